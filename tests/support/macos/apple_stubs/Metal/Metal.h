// Metal as csrc/mps and torch's MPS headers use it, declared for the type check on Linux.
#pragma once

#import <Foundation/Foundation.h>

typedef enum MTLGPUFamily : NSInteger { MTLGPUFamilyApple7 = 1007 } MTLGPUFamily;
typedef enum MTLDataType : NSUInteger { MTLDataTypeUInt = 33 } MTLDataType;
typedef enum MTLLanguageVersion : NSUInteger {
  MTLLanguageVersion3_1 = (3 << 16) + 1
} MTLLanguageVersion;
typedef enum MTLResourceOptions : NSUInteger {
  MTLResourceStorageModePrivate = 2 << 4
} MTLResourceOptions;

typedef struct {
  NSUInteger width, height, depth;
} MTLSize;

static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
  MTLSize size = {width, height, depth};
  return size;
}

#import <Metal/MTLResidencySet.h>

@protocol MTLHeap <MTLAllocation>
@end
@protocol MTLBuffer <MTLAllocation>
@property(readonly) id<MTLHeap> heap;
@end
@protocol MTLCommandBuffer <NSObject>
@end
@protocol MTLCommandQueue <NSObject>
@end
@protocol MTLSharedEvent <NSObject>
@end
@class MTLCaptureManager, MTLSharedEventListener;
typedef void (^MTLCommandBufferHandler)(id<MTLCommandBuffer>);

@protocol MTLFunction <NSObject>
@end

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@end

@interface MTLFunctionConstantValues : NSObject
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index;
@end

@interface MTLCompileOptions : NSObject
@property(readwrite, nonatomic) MTLLanguageVersion languageVersion;
@property(readwrite, nonatomic) BOOL fastMathEnabled
    __attribute__((availability(macos, introduced=10.11, deprecated=15)));
@end

@protocol MTLLibrary <NSObject>
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(__autoreleasing NSError**)error;
@end

@protocol MTLDevice <NSObject>
@property(readonly) NSString* name;
@property(readonly) MTLSize maxThreadsPerThreadgroup;
@property(readonly) NSUInteger maxThreadgroupMemoryLength;
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)wanted
                                               error:(__autoreleasing NSError**)error
    __attribute__((availability(macos, introduced = 15)));
- (BOOL)supportsFamily:(MTLGPUFamily)family;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(__autoreleasing NSError**)error;
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(__autoreleasing NSError**)error;
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(__autoreleasing NSError**)error;
@end

@protocol MTLComputeCommandEncoder <NSObject>
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state;
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads;
@end
