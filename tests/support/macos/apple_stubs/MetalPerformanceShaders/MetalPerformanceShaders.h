// The names of MetalPerformanceShaders that torch's MPS headers use.
#pragma once

#import <Metal/Metal.h>

@class MPSCommandBuffer;
