// Fixed-width integers for NVRTC, which has no C headers: the same types as in glibc's <stdint.h>.
#pragma once

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;

static_assert(sizeof(int64_t) == 8 && sizeof(uint64_t) == 8, "long has 64 bits");
