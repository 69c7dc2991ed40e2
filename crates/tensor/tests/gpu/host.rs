//! Values on their way to a GPU and back, and the memory that they lie in.

use crate::rig::{near, rig};
use phalanx_tensor::{
    Arena, DType, Device, DropoutKey, GpuOptions, Grads, Keep, Layout, Order, Philox, Room, Tensor, Within,
    autocast,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

#[test]
fn values_go_up_and_come_back_in_every_type() {
    let Some(rig) = rig(1) else { return };
    let (cpu, other) = (Device::cpu(2), Device::cpu(1));
    let x = Tensor::from_slice(&cpu, &[1.5f32, -2.0, 3.0, 0.25, 9.0, -0.0], [2, 3]);
    assert_eq!(x.to(&rig).to_vec::<f32>(), x.to_vec::<f32>());
    assert_eq!(x.to(&rig).t().to(&other).to_vec::<f32>(), x.t().to_vec::<f32>());
    assert_eq!(x.to(&rig).narrow(1, 1, 2).to_vec::<f32>(), x.narrow(1, 1, 2).to_vec::<f32>());
    assert_eq!(Tensor::from_slice(&rig, &[7i64, -8], [2]).to_vec::<i64>(), [7, -8]);
    assert_eq!(Tensor::from_slice(&rig, &[7u8, 255, 1], [3]).t_of_one().to_vec::<u8>(), [7, 255, 1]);
    assert_eq!(Tensor::from_slice(&rig, &[0.1f64; 5], [5]).to_vec::<f64>(), [0.1; 5]);
    assert_eq!(Tensor::zeros(&rig, [0, 3], DType::F32).to_vec::<f32>(), [0.0; 0]);
    for (dtype, value) in [(DType::F32, -1.5), (DType::F64, 0.1), (DType::I64, -3.0), (DType::U8, 200.0)] {
        assert_eq!(Tensor::scalar(&rig, value, dtype).item(), value, "{dtype}");
    }
    let y = x.to(&rig);
    y.with_slice_mut(|values: &mut [f32]| values[4] = 0.5);
    assert_eq!(y.with_slice(|values: &[f32]| values[4]), 0.5);
}

/// One row, whatever its length.
trait OfOne {
    fn t_of_one(&self) -> Tensor;
}

impl OfOne for Tensor {
    fn t_of_one(&self) -> Tensor {
        self.reshape([self.count(), 1]).t().reshape([self.count()])
    }
}

#[test]
fn random_numbers_are_those_of_a_cpu() {
    let Some(rig) = rig(1) else { return };
    let key = Philox::new(3, 4);
    let both = |f: &dyn Fn(&Device) -> Tensor| [f(&rig), f(&Device::cpu(1))].map(|t| t.to_vec::<f32>());
    let [got, want] = both(&|device| Tensor::uniform(device, [1003], -0.5, 2.0, DType::F32, key));
    assert_eq!(got, want);
    let [got, want] = both(&|device| Tensor::normal(device, [1003], 1.0, 2.0, DType::F32, key));
    near("normal", &got, &want.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
}

#[test]
fn an_arena_that_is_given_back_takes_no_memory_until_it_is_used_again() {
    let Some(rig) = rig(1) else { return };
    let layout = Layout::new(&[[300].into(), [2000].into()]);
    let without = rig.held_bytes();
    let arena = Arena::new(&rig, DType::F32, &layout);
    assert_eq!(rig.held_bytes(), without, "nobody has used it");
    assert_eq!(arena.tensor(0).to_vec::<f32>(), [0.0; 300]);
    let with = rig.held_bytes();
    assert_eq!(with - without, 4 * layout.len());
    let mut part = arena.set_aside::<f32>(0..1);
    part.give_back(0..part.count());
    drop(part);
    assert_eq!(rig.held_bytes(), with, "a part of it stays");
    let mut span = arena.set_aside::<f32>(0..2);
    span.give_back(0..span.count());
    assert_eq!(rig.held_bytes(), without);
    let used = catch_unwind(AssertUnwindSafe(|| arena.tensor(1).to_vec::<f32>()));
    assert!(used.is_err(), "it is borrowed as before");
    let values: Vec<f32> = (0..layout.len()).map(|i| i as f32).collect();
    span.write(&values);
    drop(span);
    assert_eq!((rig.held_bytes(), arena.read_flat::<f32>()), (with, values));
    let mut span = arena.set_aside::<f32>(0..2);
    span.give_back(0..span.count());
    drop(span);
    assert_eq!(arena.tensor(1).to_vec::<f32>(), [0.0; 2000], "what comes anew");
}

/// Whoever is refused hasn't brought the memory back, either.
#[test]
fn memory_that_was_given_back_does_not_come_for_one_who_is_refused() {
    let Some(rig) = rig(1) else { return };
    let arena = Arena::new(&rig, DType::F32, &Layout::new(&[[300].into()]));
    let mut span = arena.set_aside::<f32>(0..1);
    span.give_back(0..span.count());
    let (without, tensor) = (rig.held_bytes(), arena.tensor(0));
    let doubled = Tensor::zeros(&rig, [300], DType::F32);
    let held = rig.held_bytes();
    assert!(held > without, "room for what comes of it");
    let uses: [&dyn Fn(); 2] = [&|| doubled.copy_from(&tensor), &|| tensor.copy_from(&doubled)];
    for used in uses {
        assert!(catch_unwind(AssertUnwindSafe(used)).is_err(), "it is borrowed");
        assert_eq!(rig.held_bytes(), held);
    }
}

#[test]
fn casts_that_are_given_back_take_no_memory_until_they_are_made_again() {
    let Some(rig) = rig(1) else { return };
    let layout = Layout::new(&[[300].into(), [1, 2000].into()]);
    let (values, grads) = (Arena::new(&rig, DType::F32, &layout), Grads::new(&rig, DType::F32, &layout));
    let cast = || {
        let leaf = grads.leaf(1, &values);
        autocast(DType::BF16, || leaf.matmul(&Tensor::ones(&rig, [2000, 1], DType::F32)))
    };
    values.tensor(1).fill(2.0);
    assert_eq!(cast().item(), 4000.0);
    let with = rig.held_bytes();
    grads.give_casts_back();
    assert_eq!(with - rig.held_bytes(), 2 * layout.len());
    assert_eq!(cast().item(), 4000.0);
    values.tensor(1).fill(4.0);
    assert_eq!(cast().item(), 8000.0);
    assert_eq!(rig.held_bytes(), with);
}

/// Whoever kept a cast of what was there finds that it was written.
#[test]
fn values_that_are_written_as_a_span_count_as_written() {
    let Some(rig) = rig(1) else { return };
    for device in [&*rig, &Device::cpu(1)] {
        let layout = Layout::new(&[[1, 3].into()]);
        let (values, grads) =
            (Arena::new(device, DType::F32, &layout), Grads::new(device, DType::F32, &layout));
        let cast = || {
            autocast(DType::BF16, || {
                grads.leaf(0, &values).matmul(&Tensor::ones(device, [3, 1], DType::F32)).item()
            })
        };
        assert_eq!(cast(), 0.0);
        let mut span = values.set_aside::<f32>(0..1);
        let ones = vec![1.0; span.count()];
        span.write(&ones);
        drop(span);
        assert_eq!(cast(), 3.0);
    }
}

#[test]
fn squares_of_some_elements_are_added_up() {
    let Some(rig) = rig(1) else { return };
    let layout = Layout::new(&[[40_000].into(), [100].into(), [70].into()]);
    let values: Vec<f32> = (0..layout.len()).map(|i| (i % 7) as f32 - 3.0).collect();
    let ranges = [layout.range(0), layout.range(2), 5..5];
    let want: f64 = ranges.iter().flat_map(|range| &values[range.clone()]).map(|&x| f64::from(x * x)).sum();
    for device in [&*rig, &Device::cpu(1)] {
        let arena = Arena::new(device, DType::F32, &layout);
        arena.write_flat(&values);
        // Whole numbers, so that no order of sums rounds.
        assert_eq!(arena.sum_of_squares(&ranges), want);
        assert_eq!(arena.sum_of_squares(&[]), 0.0);
    }
}

#[test]
fn a_mask_of_a_part_is_that_part_of_the_whole_on_a_gpu_too() {
    let Some(rig) = rig(1) else { return };
    let key = DropoutKey::new(3, 4, 5, Arc::from([7u64, 1]));
    let whole = Tensor::ones(&rig, [2, 6, 5], DType::F32).dropout(0.4, &key);
    for (dim, start, len) in [(1, 0, 2), (1, 3, 3), (2, 1, 3)] {
        let of = whole.dims()[dim];
        let part = whole.narrow(dim, start, len);
        let within = Some(Within { dim, start, of });
        let ones = Tensor::ones(&rig, *part.shape(), DType::F32);
        let got = ones.dropout(0.4, &DropoutKey { within, ..key.clone() });
        assert_eq!(got.to_vec::<f32>(), part.to_vec::<f32>(), "{within:?}");
    }
}

#[test]
fn arenas_lie_on_a_gpu_and_are_read_and_written_whole() {
    let Some(rig) = rig(1) else { return };
    let layout = Layout::ordered([
        ([2, 3].into(), Order::RowMajor),
        ([4, 2, 3, 3].into(), Order::ChannelsLast),
        ([5].into(), Order::RowMajor),
    ]);
    let (arena, grads) = (Arena::new(&rig, DType::F32, &layout), Grads::new(&rig, DType::F32, &layout));
    assert_eq!(arena.read_flat::<f32>(), vec![0.0; layout.len()]);
    let kernels: Vec<f32> = (0..72).map(|i| i as f32).collect();
    let mut flat = vec![0.5; layout.len()];
    layout.put(1, &kernels, &mut flat);
    arena.write_flat(&flat);
    assert_eq!(arena.tensor(1).to_vec::<f32>(), kernels);
    assert_eq!(*layout.row_major(1, &arena.read_flat::<f32>()), kernels);
    let [a, b] = [0, 1].map(|i| grads.leaf(i, &arena));
    for want in [6.0, 12.0] {
        (a.square().sum_all() * 6.0 + b.affine(2.0, 0.0).sum_all()).backward();
        assert_eq!(grads.arena().tensor(0).to_vec::<f32>(), [want; 6]);
        assert_eq!(grads.arena().tensor(1).to_vec::<f32>(), [want / 3.0; 72]);
    }
    grads.zero();
    assert_eq!(grads.settle(), [0, 1, 2]);
    assert_eq!(grads.arena().read_flat::<f32>()[..6], [0.0; 6]);
    let lent = catch_unwind(AssertUnwindSafe(|| arena.flat::<f32>().len()));
    let words = lent.unwrap_err().downcast::<&str>().map(|words| words.to_string()).unwrap_or_default();
    assert!(words.contains("read_flat"), "{words}");
}

#[test]
fn memory_is_used_again_and_given_back_before_there_is_none() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let allocations = || fake.calls("cuMemAlloc_v2");
    let x = Tensor::ones(&rig, [1 << 16], DType::F32);
    drop(&x + &x);
    let before = allocations();
    assert_eq!((&x + &x).sum(&[0], Keep::No).item(), 2.0 * 65536.0);
    assert!(allocations() <= before + 2, "the sum has parts");
    // Two thirds of all are in the cache, in pieces that fit nothing else.
    fake.limit_memory(0, fake.count(phalanx_fake_cuda::Count::Bytes) + (1 << 20));
    drop(Tensor::zeros(&rig, [(3 << 20) / 16], DType::F32));
    let y = Tensor::ones(&rig, [(3 << 20) / 16 + 65536], DType::F32);
    assert_eq!(y.narrow(0, 0, 1).item(), 1.0);
    let refused = catch_unwind(AssertUnwindSafe(|| Tensor::zeros(&rig, [1 << 20], DType::F32)));
    let words = *refused.unwrap_err().downcast::<String>().unwrap();
    assert!(words.contains("out of memory on GPU 0") && words.contains("this process holds"), "{words}");
}

/// As a tool wants it that knows what was allocated.
#[test]
fn exact_memory_is_as_long_as_what_lies_there_and_goes_with_it() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let options = GpuOptions { libraries: vec![fake.folder().to_owned()], ..GpuOptions::default() };
    let device = Device::cuda(0, &options).unwrap();
    device.set_exact_memory();
    let bytes = || fake.count(phalanx_fake_cuda::Count::Bytes);
    let before = bytes();
    let x = Tensor::from_slice(&device, &[1.0f32; 333], [333]);
    assert_eq!(bytes() - before, 4 * 333);
    let y = &x + &x;
    assert_eq!((bytes() - before, y.sum_all().item()), (8 * 333, 666.0));
    let samples: Arc<[u64]> = [0].into();
    let (rehearsal, sum) = device.rehearse(&Room::default(), 0, &samples, || &x + &y).unwrap();
    assert!(rehearsal.refusal().is_some(), "nothing can be allocated while the GPU records");
    assert_eq!(sum.narrow(0, 0, 1).item(), 3.0);
    drop((x, y, sum, rehearsal));
    assert_eq!((bytes(), device.held_bytes()), (before, 0));
}

#[test]
fn labels_that_are_no_classes_are_told_by_whoever_reads_the_loss() {
    let Some(rig) = rig(1) else { return };
    let scores = Tensor::zeros(&rig, [2, 3], DType::F32);
    let loss = scores.cross_entropy(&Tensor::from_slice(&rig, &[3i64, 0], [2]), 0.0);
    let refused = catch_unwind(AssertUnwindSafe(|| loss.item()));
    let words = refused.unwrap_err().downcast::<&str>().map(|words| words.to_string()).unwrap_or_default();
    assert!(words.contains("label"), "{words}");
    // So is the gradient, for whoever looks at that.
    type Loss = fn(&Tensor, &Tensor) -> Tensor;
    let losses: [Loss; 2] = [|x, labels| x.cross_entropy(labels, 0.1), Tensor::nll_loss];
    for loss in losses {
        let scores = scores.clone().requires_grad();
        let grads = loss(&scores, &Tensor::from_slice(&rig, &[-1i64, 0], [2])).backward();
        let grad = grads.get(&scores).unwrap().to_vec::<f32>();
        assert!(grad[..3].iter().all(|x| x.is_nan()) && grad[3..].iter().all(|x| x.is_finite()), "{grad:?}");
    }
    let loss = scores.cross_entropy(&Tensor::from_slice(&rig, &[2i64, 0], [2]), 0.0);
    assert!((loss.item() - 3f64.ln()).abs() < 1e-6);
}

#[test]
fn what_a_gpu_cannot_do_is_named() {
    let Some(rig) = rig(1) else { return };
    let x = Tensor::zeros(&rig, [2], DType::F64);
    let refused = catch_unwind(AssertUnwindSafe(|| x.exp()));
    let words = *refused.unwrap_err().downcast::<String>().unwrap();
    assert!(words.contains("exponential") && words.contains("f64"), "{words}");
}

/// Cut into one piece or into several, memory goes to other tensors while it is given back, and nobody waits for it.
#[test]
fn an_arena_that_is_cut_lends_its_memory_and_is_one_again() {
    let Some(rig) = rig(1) else { return };
    let layout = Layout::new(&[[300].into(), [2000].into(), [5].into()]);
    let runs: [&[std::ops::Range<usize>]; 2] = [std::slice::from_ref(&(0..3)), &[0..1, 1..3]];
    for runs in runs {
        let arena = Arena::new(&rig, DType::F32, &layout);
        let values: Vec<f32> = (0..layout.len()).map(|i| i as f32).collect();
        arena.write_flat(&values);
        arena.cut(runs);
        assert_eq!(arena.read_flat::<f32>(), values, "{runs:?}: values stay");
        let last = runs[runs.len() - 1].clone();
        let mut span = arena.set_aside::<f32>(last.clone());
        span.give_back(0..span.count());
        let held = rig.held_bytes();
        // As large as what was given back, so in its place.
        let other = Tensor::zeros(&rig, [layout.span(last.clone()).len()], DType::F32);
        assert_eq!(rig.held_bytes(), held, "{runs:?}");
        drop(other);
        drop(span);
        assert_eq!(arena.tensor(1).to_vec::<f32>(), [0.0; 2000], "what comes anew");
        let kept = if runs.len() > 1 { &values[..300] } else { &[0.0; 300] };
        assert_eq!(arena.tensor(0).to_vec::<f32>(), kept, "{runs:?}");
        arena.write_flat(&values);
        arena.join();
        arena.scale(2.0);
        let doubled: Vec<f32> = values.iter().map(|value| 2.0 * value).collect();
        assert_eq!(arena.read_flat::<f32>(), doubled, "{runs:?}: in one run again");
    }
}

/// By numbers that are none, and once one is read, or whole numbers, which look like any others; whatever is made later is right again.
#[test]
fn a_place_that_is_not_there_is_told_where_a_number_is_read() {
    let Some(rig) = rig(3) else { return };
    let at = |places: &[i64]| Tensor::from_slice(&rig, places, [places.len()]);
    let ones = Tensor::ones(&rig, [3], DType::F32);
    let added = || Tensor::zeros(&rig, [2], DType::F32).scatter_add(0, &at(&[0, 2, 1]), &ones);
    let told = |read: &dyn Fn()| {
        let panic = catch_unwind(AssertUnwindSafe(read)).unwrap_err();
        let words = panic.downcast_ref::<&str>().unwrap();
        assert!(words.contains("or a place beyond its dimension"), "{words}");
        // By one alone.
        assert_eq!(ones.to_vec::<f32>(), [1.0; 3]);
    };
    assert!(added().to_vec::<f32>().iter().all(|number| number.is_nan()));
    told(&|| _ = added().sum_all().item_later().item());
    let taken = || Tensor::arange(&rig, 0..4).gather(0, &at(&[3, -1]));
    told(&|| drop(taken().to_vec::<i64>()));
    told(&|| _ = taken().narrow(0, 0, 1).item());
    told(&|| drop(taken().to_vec_later::<i64>().to_vec()));
}
