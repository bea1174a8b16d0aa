// The names of signposts that torch's MPSProfiler.h uses.
#pragma once

#include <stdint.h>

#import <os/log.h>

typedef uint64_t os_signpost_id_t;
typedef uint8_t os_signpost_type_t;
