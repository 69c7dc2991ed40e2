//! The definition of convolution and its gradients as plain loops: what the fast kernels are tested against.

use super::Plan;

/// Calls `f(output, input, kernel)` with the positions of every product that a convolution sums.
fn products(p: Plan, mut f: impl FnMut(usize, usize, usize)) {
    let (ig, og) = (p.c / p.options.groups, p.o / p.options.groups);
    for n in 0..p.n {
        for o in 0..p.o {
            for (y, x) in (0..p.oh).flat_map(|y| (0..p.ow).map(move |x| (y, x))) {
                for i in 0..ig {
                    for (ky, kx) in (0..p.kh).flat_map(|y| (0..p.kw).map(move |x| (y, x))) {
                        let row = y * p.options.stride[0] + ky * p.options.dilation[0];
                        let col = x * p.options.stride[1] + kx * p.options.dilation[1];
                        let (Some(row), Some(col)) =
                            (row.checked_sub(p.options.padding[0]), col.checked_sub(p.options.padding[1]))
                        else {
                            continue;
                        };
                        if row < p.h && col < p.w {
                            let channel = o / og * ig + i;
                            f(
                                ((n * p.o + o) * p.oh + y) * p.ow + x,
                                ((n * p.c + channel) * p.h + row) * p.w + col,
                                ((o * ig + i) * p.kh + ky) * p.kw + kx,
                            );
                        }
                    }
                }
            }
        }
    }
}

pub(crate) fn forward(x: &[f64], w: &[f64], b: Option<&[f64]>, p: Plan) -> Vec<f64> {
    let area = p.oh * p.ow;
    let mut out: Vec<f64> = (0..p.n * p.o * area).map(|i| b.map_or(0.0, |b| b[i / area % p.o])).collect();
    products(p, |o, i, k| out[o] += x[i] * w[k]);
    out
}

pub(crate) fn image_gradient(g: &[f64], w: &[f64], p: Plan) -> Vec<f64> {
    let mut out = vec![0.0; p.n * p.image()];
    products(p, |o, i, k| out[i] += g[o] * w[k]);
    out
}

pub(crate) fn kernel_gradient(x: &[f64], g: &[f64], p: Plan) -> Vec<f64> {
    let mut out = vec![0.0; p.o * p.c / p.options.groups * p.kh * p.kw];
    products(p, |o, i, k| out[k] += g[o] * x[i]);
    out
}
