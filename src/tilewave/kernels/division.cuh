// Division of small numbers by one divisor that is known only at run time, as a multiplication.
#pragma once

namespace tilewave {

// Divides numbers n below 65,536 by a divisor d from 1 to 65,536, exactly: the quotient is that of n + 1/2, which is at
// least 1/(2 d) away from every integer, and an approximate reciprocal, off by 2^-23 of itself at most, puts
// (n + 1/2) / d wrong by less than 2^16 / d * 2^-23 = 2^-7 / d. Between 2^23 and 2^24 the numbers of 32 bits are the
// integers, so that adding 2^23 converts and rounds.
class Divisor {
  public:
    __device__ __forceinline__ explicit Divisor(int divisor) {
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(static_cast<float>(divisor)));
    }

    __device__ __forceinline__ int quotient(int number) const {
        const float half_more = __int_as_float(TWO_23 | number) - 8388607.5f;
        return __float_as_int(__fmaf_rd(half_more, reciprocal, 8388608.0f)) & ~TWO_23;
    }

  private:
    static constexpr int TWO_23 = 0x4b000000;  // the bits of 2^23
    float reciprocal;
};

}  // namespace tilewave
