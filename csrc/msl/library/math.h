// <metal_math>, <metal_common>, <metal_relational>, <metal_geometric>.
#pragma once

#include "common.h"
#include "functions.h"
#include "geometric.h"
