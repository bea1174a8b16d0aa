// The names of the unified log that torch's MPSProfiler.h uses.
#pragma once

#import <os/object.h>

OS_OBJECT_DECL(os_log);
