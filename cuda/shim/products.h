// Products of 16 rows by 16 of k, which both kinds of tensor-core instructions are made of.
#pragma once
#include <cstdint>
#include <cstring>

namespace shim {

// Adds a product to `d`, whose columns are a multiple of 8; each sum in the order of k.
template <size_t COLUMNS>
void add_product(float (&d)[16][COLUMNS], const float (&a)[16][16], const float (&b)[16][COLUMNS], uint32_t columns) {
    typedef float Four __attribute__((vector_size(16)));
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t column = 0; column < columns; column += 8) {
            Four low, high;
            memcpy(&low, &d[row][column], sizeof low);
            memcpy(&high, &d[row][column + 4], sizeof high);
            for (uint32_t k = 0; k < 16; k++) {
                Four x, y;
                memcpy(&x, &b[k][column], sizeof x);
                memcpy(&y, &b[k][column + 4], sizeof y);
                low += a[row][k] * x;
                high += a[row][k] * y;
            }
            memcpy(&d[row][column], &low, sizeof low);
            memcpy(&d[row][column + 4], &high, sizeof high);
        }
    }
}

}  // namespace shim
