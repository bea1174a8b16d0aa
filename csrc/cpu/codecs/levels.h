// The values that the codes of iq4_nl and iq4_xs stand for.
#pragma once

namespace metalmm::cpu {

inline constexpr float kIQ4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};

}  // namespace metalmm::cpu
