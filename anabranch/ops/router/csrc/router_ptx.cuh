// The instructions of the router beyond those of the experts' products with a vector. No policy here.
#pragma once
#include "../expert_ffn/csrc/gemv_ptx.cuh"

struct Mail { uint64_t a, b; };  // two words
// A word carries its own flag, so that nothing has to be ordered behind it: single words are never torn.
DEV Mail read_mail(const uint64_t* p) {
  Mail m;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(m.a), "=l"(m.b) : "l"(p) : "memory");
  return m;
}
DEV void send_mail(uint64_t* p, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
}
DEV void clear_mail(uint64_t* p) { *reinterpret_cast<uint4*>(p) = make_uint4(0, 0, 0, 0); }

// Volatile, so that it stays in front of the wait.
DEV float load_weight(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
DEV void store_written(uint16_t* p, const uint4& v) { *reinterpret_cast<uint4*>(p) = v; }
template <class T> DEV void store_choice(T* p, T value) { *p = value; }

// --- arithmetic as Triton compiles it in ops/norm: pairs of bf16, the rounding named so that nothing is contracted ---
DEV uint32_t add_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV float divide(float a, float b) {
  float d;
  asm("div.full.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
DEV float reciprocal_root(float x) {
  float d;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// Whatever is made from v is made behind this point.
DEV void pin(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

// --- a warp ---
DEV uint32_t lanes_where(bool x) { return __ballot_sync(~0u, x); }
DEV uint32_t least(uint32_t x) { return __reduce_min_sync(~0u, x); }
DEV void warp_barrier() { __syncwarp(); }
DEV int set_bits(uint32_t x) { return __popc(x); }
// -1 or 0 without a chain of selections
DEV int minus_greater(uint32_t a, uint32_t b) {
  int d;
  asm("set.gt.u32.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV int minus_greater(uint64_t a, uint64_t b) {
  int d;
  asm("set.gt.u32.u64 %0, %1, %2;" : "=r"(d) : "l"(a), "l"(b));
  return d;
}
// to shared memory, without a branch
DEV void store_if(bool wanted, uint4* p, const uint4& v) {
  asm volatile("{\n.reg .pred q;\nsetp.ne.u32 q, %5, 0;\n@q st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n}"
               ::"r"(shared_address(p)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((uint32_t)wanted) : "memory");
}
