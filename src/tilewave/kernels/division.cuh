// Division of small numbers by one divisor that is known only at run time, as a multiplication.
#pragma once

namespace tilewave {

// Divides numbers below 65,536 by a divisor from 1 to 65,536, exactly: with r = ceil(2^32 / d) = (2^32 + e) / d,
// e < d, the product n r / 2^32 exceeds n / d by n e / (2^32 d) < 1 / d.
class Divisor {
  public:
    __device__ __forceinline__ explicit Divisor(unsigned divisor)
        : reciprocal(divisor == 1 ? 0 : 0xffffffffu / divisor + 1) {}

    __device__ __forceinline__ int quotient(unsigned number) const {
        return reciprocal == 0 ? number : __umulhi(number, reciprocal);
    }

  private:
    unsigned reciprocal;  // 0 for the divisor 1, whose 2^32 does not fit
};

}  // namespace tilewave
