//! Elements that are chosen by masks and by places.

use crate::cases::{Check, random};
use crate::{DType, Device, Keep, Tensor};

/// What is chosen, and its gradient.
pub fn choices(c: &impl Check) {
    // A mask of numbers that don't follow the inputs, so that differences don't cross an edge.
    let mask = |x: &Tensor, shape: &[usize]| random(x, shape, 5).gt(0.25);
    c.check(&[&[2, 3], &[2, 3]], |x| mask(&x[0], &[2, 3]).where_cond(&x[0], &x[1]));
    c.check(&[&[2, 3, 4], &[3, 1]], |x| mask(&x[0], &[4]).where_cond(&x[0], &x[1]));
    c.check(&[&[3], &[]], |x| mask(&x[0], &[2, 4, 1]).where_cond(&x[0], &x[1]));
    c.check(&[&[3, 3]], |x| mask(&x[0], &[3, 3]).where_cond(&x[0], &x[0].t()));
    c.check(&[&[70, 40]], |x| x[0].masked_fill(&mask(&x[0], &[40]), -2.0));
    c.check(&[&[2, 5]], |x| x[0].clamp(-0.375, 0.25));
    for keep in [Keep::Yes, Keep::No] {
        c.check(&[&[2, 3, 4]], |x| x[0].min(1, keep));
    }
    let places = |x: &Tensor, places: &[i64], shape: &[usize]| Tensor::from_slice(x.device(), places, shape);
    c.check(&[&[2, 3]], |x| x[0].gather(1, &places(&x[0], &[2, 0, 2, 1, 1, 1, 0, 2], &[2, 4])));
    c.check(&[&[3, 2, 2]], |x| x[0].gather(0, &places(&x[0], &[2, 0, 1, 2], &[1, 2, 2])));
    c.check(&[&[3, 2]], |x| x[0].t().gather(1, &places(&x[0], &[2, 0], &[2, 1])));
    // Enough for several threads.
    let many: Vec<i64> = (0..200 * 90).map(|i| i * i % 3).collect();
    c.check(&[&[200, 3]], |x| x[0].gather(1, &places(&x[0], &many, &[200, 90])));
    c.check(&[&[2, 4, 3]], |x| x[0].index_select(1, &places(&x[0], &[3, 0, 3], &[3])));
    c.check(&[&[2, 3], &[2, 4]], |x| {
        x[0].scatter_add(1, &places(&x[0], &[2, 0, 2, 1, 1, 1, 0, 2], &[2, 4]), &x[1])
    });
    c.check(&[&[3, 2, 2], &[1, 2, 2]], |x| {
        x[0].scatter_add(0, &places(&x[0], &[2, 0, 1, 2], &[1, 2, 2]), &x[1])
    });
    for k in [1, 2, 4] {
        c.check(&[&[3, 4]], |x| x[0].topk(k, 1).0);
        c.check(&[&[4, 3]], |x| x[0].topk(k, 0).0);
    }
    // More of a row than a block has threads.
    c.check(&[&[2, 1500]], |x| x[0].topk(3, 1).0);
}

/// What holds between numbers, what becomes of edges, and whole numbers.
#[track_caller]
pub fn comparisons(device: &Device) {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let (left, right) = ([1.0, 2.0, 3.0, NAN, NAN, -0.0, INF], [2.0, 2.0, 2.0, 1.0, NAN, 0.0, INF]);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let [a, b] = [left, right].map(|x| Tensor::from_slice(device, &x, [7]).cast(dtype));
        let held = |mask: Tensor| mask.to_vec::<f32>().iter().map(|&x| x as u8).collect::<Vec<_>>();
        assert_eq!(held(a.lt(&b)), [1, 0, 0, 0, 0, 0, 0], "lt, {dtype}");
        assert_eq!(held(a.le(&b)), [1, 1, 0, 0, 0, 1, 1], "le, {dtype}");
        assert_eq!(held(a.gt(&b)), [0, 0, 1, 0, 0, 0, 0], "gt, {dtype}");
        assert_eq!(held(a.ge(&b)), [0, 1, 1, 0, 0, 1, 1], "ge, {dtype}");
        assert_eq!(held(a.eq(&b)), [0, 1, 0, 0, 0, 1, 1], "eq, {dtype}");
        assert_eq!(held(a.ne(&b)), [1, 0, 1, 1, 1, 0, 0], "ne, {dtype}");
        assert_eq!(held(a.gt(1.5)), [0, 1, 1, 0, 0, 0, 1], "gt of a number, {dtype}");
        // A number of another type counts as it is, and is not rounded first.
        let third = Tensor::scalar(device, 1.0 / 3.0, DType::F32);
        assert_eq!(third.cast(dtype).eq(&third).item(), f64::from(dtype == DType::F32), "{dtype}");
    }
    let whole = |values: &[i64]| Tensor::from_slice(device, values, [values.len()]);
    // Beyond what an f32 or an f64 tells apart.
    let (a, b) = (whole(&[1 << 60, 5, -3]), whole(&[(1 << 60) + 1, 5, -4]));
    assert_eq!(a.lt(&b).to_vec::<f32>(), [1.0, 0.0, 0.0]);
    assert_eq!(a.eq(&b).to_vec::<f32>(), [0.0, 1.0, 0.0]);
    assert_eq!(a.ne(5.0).where_cond(&a, &whole(&[-1])).to_vec::<i64>(), [1 << 60, -1, -3]);
    assert_eq!(a.lt(&b.reshape([3, 1])).dims(), [3, 3]);

    let floats = Tensor::from_slice(device, &[-2.7f32, 3.9, NAN, INF, -INF], [5]);
    assert_eq!(floats.cast(DType::I64).to_vec::<i64>(), [-2, 3, 0, i64::MAX, i64::MIN]);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let back = whole(&[5, -3]).cast(dtype).cast(DType::F32).to_vec::<f32>();
        assert_eq!(back, [5.0, -3.0], "{dtype}");
        assert_eq!(whole(&[5, -3]).cast(dtype).cast(DType::I64).to_vec::<i64>(), [5, -3], "{dtype}");
    }

    // What isn't chosen is neither seen nor learnt from.
    let x = Tensor::from_slice(device, &[NAN, INF, 2.0], [3]).requires_grad();
    let kept = x.masked_fill(&x.gt(1e30), 0.0).masked_fill(&x.ne(&x), 1.0);
    assert_eq!(kept.to_vec::<f32>(), [1.0, 0.0, 2.0]);
    assert_eq!(kept.square().sum_all().backward().get(&x).unwrap().to_vec::<f32>(), [0.0, 0.0, 4.0]);
    // A mask may be of whole numbers.
    let ids = Tensor::from_slice(device, &[0i64, 7, 0], [3]);
    assert_eq!(kept.masked_fill(&ids, 5.0).to_vec::<f32>(), [1.0, 5.0, 2.0]);
    let x = Tensor::from_slice(device, &[-2.0f32, -1.0, 0.5, 1.0, NAN], [5]).requires_grad();
    let within = x.clamp(-1.0, 1.0);
    assert_eq!(within.narrow(0, 0, 4).to_vec::<f32>(), [-1.0, -1.0, 0.5, 1.0]);
    assert!(within.to_vec::<f32>()[4].is_nan());
    assert_eq!(within.sum_all().backward().get(&x).unwrap().to_vec::<f32>(), [0.0, 0.0, 1.0, 0.0, 0.0]);
}

/// Whole numbers are computed with as such, and wrap around.
#[track_caller]
pub fn whole_numbers(device: &Device) {
    let whole = |values: &[i64]| Tensor::from_slice(device, values, [values.len()]);
    let (a, b) = (whole(&[7, -7, 1 << 60, i64::MIN]), whole(&[2, 2, -3, -1]));
    assert_eq!((&a + &b).to_vec::<i64>(), [9, -5, (1 << 60) - 3, i64::MAX]);
    assert_eq!((&a - &b).to_vec::<i64>(), [5, -9, (1 << 60) + 3, i64::MIN + 1]);
    assert_eq!((&a * &b).to_vec::<i64>(), [14, -14, -3 << 60, i64::MIN]);
    assert_eq!(a.maximum(&b).to_vec::<i64>(), [7, 2, 1 << 60, -1]);
    assert_eq!(a.minimum(&b).to_vec::<i64>(), [2, -7, -3, i64::MIN]);
    assert_eq!(a.floor_div(&b).to_vec::<i64>(), [3, -4, -384_307_168_202_282_326, i64::MIN]);
    assert_eq!(a.remainder(&b).to_vec::<i64>(), [1, 1, -2, 0]);
    assert_eq!(a.floor_div(-2.0).to_vec::<i64>(), [-4, 3, -1 << 59, 1 << 62]);
    assert_eq!((&a * 3.0 + 1.0).to_vec::<i64>()[..3], [22, -20, (3 << 60) + 1]);
    assert_eq!((-&a).to_vec::<i64>(), [-7, 7, -1 << 60, i64::MIN]);
    assert_eq!(a.abs().to_vec::<i64>(), [7, 7, 1 << 60, i64::MIN]);
    assert_eq!(b.square().to_vec::<i64>(), [4, 4, 9, 1]);
    assert_eq!(a.clamp(-5.0, f64::INFINITY).to_vec::<i64>(), [7, -5, 1 << 60, -5]);
    let table = (whole(&[10, 20]).reshape([2, 1]) + whole(&[1, 2, 3])).t();
    assert_eq!(table.to_vec::<i64>(), [11, 21, 12, 22, 13, 23]);
    assert_eq!(table.sum(&[0], Keep::No).to_vec::<i64>(), [36, 66]);
    assert_eq!(table.sum(&[1], Keep::Yes).to_vec::<i64>(), [32, 34, 36]);
    let many = Tensor::arange(device, -3..3000);
    assert_eq!(many.sum_all().to_vec::<i64>(), [(0..3000).sum::<i64>() - 6]);
    let more = Tensor::arange(device, 0..40_000).reshape([20_000, 2]).t();
    assert_eq!(more.sum(&[1], Keep::No).to_vec::<i64>(), [399_980_000, 400_000_000]);
    assert_eq!(many.split(1000, 0).iter().map(Tensor::count).collect::<Vec<_>>(), [1000, 1000, 1000, 3]);
    assert_eq!(many.chunk(4, 0)[3].dims(), [750]);
    assert_eq!(many.narrow(0, 0, 4).flip(0).to_vec::<i64>(), [0, -1, -2, -3]);
    let back: Vec<i64> = (0..20_000).map(|i| 39_998 - 2 * i).collect();
    assert_eq!(more.flip(1).narrow(0, 0, 1).to_vec::<i64>(), back);
    let rows = Tensor::arange(device, 0..40_000).reshape([20_000, 2]);
    let last = |of: &Tensor| of.narrow(0, 19_998, 2).to_vec::<i64>();
    assert_eq!(
        (last(&rows.flip(0)), last(&rows.flip(1))),
        (vec![2, 3, 0, 1], vec![39_997, 39_996, 39_999, 39_998])
    );
    assert_eq!(whole(&[4]).pad(0, [1, 1], -1.0).to_vec::<i64>(), [-1, 4, -1]);
    let infinite =
        Tensor::from_slice(device, &[f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0, f32::INFINITY], [2, 2]);
    assert_eq!(infinite.logsumexp(1, Keep::No).to_vec::<f32>(), [f32::NEG_INFINITY, f32::INFINITY]);
    let steep = Tensor::from_slice(device, &[-200.0f32, 0.0, 200.0], [3]).softplus().to_vec::<f32>();
    assert_eq!((steep[0], steep[2]), (0.0, 200.0));
    assert!((steep[1] - 2f32.ln()).abs() < 1e-6, "{steep:?}");
}

/// The largest come first, of equals the first, and before all what is no number.
#[track_caller]
pub fn the_largest_come_first(device: &Device) {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let x = Tensor::from_slice(device, &[1.0, NAN, 3.0, 3.0, NAN, -INF, -INF, INF], [1, 8]);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (values, places) = x.cast(dtype).topk(8, 1);
        assert_eq!(places.to_vec::<i64>(), [1, 4, 7, 2, 3, 0, 5, 6], "{dtype}");
        assert_eq!(values.cast(DType::F32).to_vec::<f32>()[2..], [INF, 3.0, 3.0, 1.0, -INF, -INF], "{dtype}");
    }
    assert_eq!(x.reshape([8, 1]).topk(3, 0).1.to_vec::<i64>(), [1, 4, 7]);
    assert_eq!(x.topk(0, 1).0.dims(), [1, 0]);
    assert_eq!(x.narrow(1, 2, 5).argmin(1).to_vec::<i64>(), [2]);
}
