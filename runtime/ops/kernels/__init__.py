"""The kernels of the `cpu` backend, in Numba.

One order of sums for every number of rows and threads and for every CPU, kept by construction:

* a vector has 16 lanes, whatever the CPU has (`lanes`), and every multiply-add is an explicit fused one;
* matrix rows times activations: per block of 32 columns, lane l takes column 2l, then 2l + 1; then a fixed tree
  over the lanes (`formats`, `tiles`). bf16, float32 and MXFP4 matrices alike;
* other sums: 16 lanes (index mod 16) and the same tree along a row; in order over sources, taps, channels, experts,
  and over positions in chains of 128 (`rows`, `attention`);
* exp, σ, tanh and softplus are our own (`elementary`); √ and ÷ are IEEE's. No BLAS, libm, SVML or fast-math.

How many rows are taken together is a matter of registers and caches alone (`shapes`, `matrices`).

`matrices`, `rows` and `attention` hold the functions that Python calls; `jit` compiles and keeps them.
"""
