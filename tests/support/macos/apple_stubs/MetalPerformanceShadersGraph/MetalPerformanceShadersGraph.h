// The names of MetalPerformanceShadersGraph that torch's MPS headers use.
#pragma once

#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

@class MPSGraph, MPSGraphCompilationDescriptor, MPSGraphExecutionDescriptor;
