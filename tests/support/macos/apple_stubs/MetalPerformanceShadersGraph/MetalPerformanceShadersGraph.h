// What torch's MPS headers name of MetalPerformanceShadersGraph.
#pragma once

#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

@class MPSGraph, MPSGraphCompilationDescriptor, MPSGraphExecutionDescriptor;
