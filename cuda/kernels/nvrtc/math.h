// INFINITY for NVRTC, which has no C headers and knows the functions of <math.h> by itself.
#pragma once

#define INFINITY __int_as_float(0x7f800000)
