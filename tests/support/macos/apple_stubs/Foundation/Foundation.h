// Foundation as csrc/mps and torch's MPS headers use it, declared for the type check on Linux.
// test_mps_types.py compares selectors and values with those that PyObjC recorded from Apple's SDK.
#pragma once

#import <dispatch/dispatch.h>
#import <objc/NSObjCRuntime.h>
#import <objc/NSObject.h>

@class NSDictionary, NSError, NSString, NSURL;

@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)bytes;
@property(readonly) const char* UTF8String;
@end

@interface NSURL : NSObject
+ (instancetype)fileURLWithPath:(NSString*)path;
@end

@interface NSError : NSObject
@property(readonly, copy) NSString* localizedDescription;
@end

typedef struct {
  NSInteger majorVersion, minorVersion, patchVersion;
} NSOperatingSystemVersion;

@interface NSProcessInfo : NSObject
@property(class, readonly, strong) NSProcessInfo* processInfo;
@property(readonly) NSOperatingSystemVersion operatingSystemVersion;
@end
