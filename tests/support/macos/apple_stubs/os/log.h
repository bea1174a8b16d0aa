// What torch's MPSProfiler.h names of the unified log.
#pragma once

#import <os/object.h>

OS_OBJECT_DECL(os_log);
