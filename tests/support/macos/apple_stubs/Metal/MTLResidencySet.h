// The residency sets of macOS 15, as Metal.h.
#pragma once

#import <Foundation/Foundation.h>

@protocol MTLAllocation <NSObject>
@end

__attribute__((availability(macos, introduced = 15)))
@interface MTLResidencySetDescriptor : NSObject
@end

__attribute__((availability(macos, introduced = 15)))
@protocol MTLResidencySet<NSObject>
- (void)addAllocation:(id<MTLAllocation>)allocation;
- (void)removeAllocation:(id<MTLAllocation>)allocation;
- (void)commit;
- (void)requestResidency;
- (void)endResidency;
@end
