// What torch's MPS headers name of MetalPerformanceShaders.
#pragma once

#import <Metal/Metal.h>

@class MPSCommandBuffer;
