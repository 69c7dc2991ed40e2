//! What goes over ranks at the seams of layers: five pairs of maps, each the way back of the other. Values travel in their own type;
//! sums of those of 16 bits are rounded after each two.

use crate::ranks::Ranks;
use phalanx_comm::{Element as Sent, GpuGroup, ReduceOp, bf16, f16};
use phalanx_tensor::{Crossing, DType, Element, Tensor};
use std::sync::Arc;

impl Ranks {
    /// A map that goes over these ranks.
    pub(crate) fn crossing(&self, forth: Move, back: Move) -> Arc<dyn Crossing> {
        Arc::new(OverRanks { ranks: self.clone(), forth, back })
    }

    /// The ranks' columns (..., C / n) side by side, (..., C): outside of the graph.
    pub(crate) fn side_by_side(&self, x: &Tensor) -> Tensor {
        let (last, mut dims) = (x.dims().len() - 1, x.dims().to_vec());
        let width = dims[last];
        dims[last] *= self.count();
        let all = Tensor::zeros(x.device(), dims.as_slice(), x.dtype());
        all.narrow(last, self.rank() * width, width).copy_from(x);
        self.reduced(&all, ReduceOp::Sum)
    }
}

/// What becomes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// It stays as it is.
    Keep,
    /// The ranks' are added up.
    Sum,
    /// The ranks' stretches (B, T / n, ...) are brought together, (B, T, ...).
    Gather,
    /// The ranks' (B, T, ...) are added up, and each takes its stretch, (B, T / n, ...).
    Scatter,
    /// Of the rows (T, ...), which all ranks have, each takes its stretch.
    OwnRows,
    /// The way back from that: zeros take the place of the others' rows.
    PadRows,
    /// Of the ranks' stretches of queries, keys and values (B, T / n, 3 W), keys and values are brought together; zeros take the place of
    /// the others' queries, (B, T, 3 W).
    GatherKeys,
    /// The way back from that: of keys and values the ranks' are added up, of queries each has its own.
    ScatterKeys,
}

struct OverRanks {
    ranks: Ranks,
    forth: Move,
    back: Move,
}

impl Crossing for OverRanks {
    fn forth(&self, x: &Tensor) -> Tensor {
        self.ranks.moved(self.forth, x)
    }

    fn back(&self, grad: &Tensor) -> Tensor {
        self.ranks.moved(self.back, grad)
    }
}

impl Ranks {
    fn moved(&self, how: Move, x: &Tensor) -> Tensor {
        match x.dtype() {
            DType::BF16 => self.moved_as::<bf16>(how, x),
            DType::F16 => self.moved_as::<f16>(how, x),
            _ => self.moved_as::<f32>(how, x),
        }
    }

    fn moved_as<T: Element + Sent>(&self, how: Move, x: &Tensor) -> Tensor {
        let (n, rank) = (self.count(), self.rank());
        match how {
            Move::Keep => x.clone(),
            Move::Sum => self.reduced_as::<T>(x, ReduceOp::Sum),
            Move::Gather => {
                let [batch, stretch, behind] = sequence(x);
                let own = x.reshape([batch, stretch, behind]);
                let lend = || own.to_lend_among(n, rank);
                let all = self.on_gpus(lend, |gpus, all| gpus.start_all_gather(all)).unwrap_or_else(|| {
                    let own = self.on_host::<T>(&own);
                    let mut all = vec![T::default(); n * own.len()];
                    self.note(self.group().all_gather(&own, &mut all));
                    Tensor::from_slice(x.device(), &all, [n, batch, stretch, behind])
                });
                all.transpose(0, 1).reshape(with_length(x, n * stretch).as_slice())
            }
            Move::Scatter => {
                let [batch, time, behind] = sequence(x);
                let stretch = self.stretch(time);
                let by_rank = x.reshape([batch, n, stretch, behind]).transpose(0, 1);
                let sum = |gpus: &GpuGroup, all| gpus.start_reduce_scatter(all, ReduceOp::Sum);
                if let Some(all) = self.on_gpus(|| by_rank.to_lend(), sum) {
                    return all.narrow(0, rank, 1).reshape(with_length(x, stretch).as_slice());
                }
                let mut all = self.on_host::<T>(&by_rank);
                self.note(self.group().reduce_scatter_in_place(&mut all, ReduceOp::Sum));
                let own = &all[self.group().own_part(all.len())];
                Tensor::from_slice(x.device(), own, with_length(x, stretch).as_slice())
            }
            Move::OwnRows => {
                let stretch = self.stretch(x.dims()[0]);
                x.narrow(0, rank * stretch, stretch).contiguous()
            }
            Move::PadRows => {
                let (rows, mut dims) = (x.dim(0), x.dims().to_vec());
                dims[0] *= n;
                let all = Tensor::zeros(x.device(), dims.as_slice(), x.dtype());
                all.narrow(0, rank * rows, rows).copy_from(x);
                all
            }
            Move::GatherKeys => {
                let (stretch, width) = (x.dim(1), x.dim(2) / 3);
                let all = Tensor::zeros(x.device(), with_length(x, n * stretch).as_slice(), x.dtype());
                let own = all.narrow(1, rank * stretch, stretch).narrow(2, 0, width);
                own.copy_from(&x.narrow(2, 0, width));
                let keys = self.moved_as::<T>(Move::Gather, &x.narrow(2, width, 2 * width));
                all.narrow(2, width, 2 * width).copy_from(&keys);
                all
            }
            Move::ScatterKeys => {
                let (stretch, width) = (self.stretch(x.dim(1)), x.dim(2) / 3);
                let own = x.narrow(1, rank * stretch, stretch).copied();
                let keys = self.moved_as::<T>(Move::Scatter, &x.narrow(2, width, 2 * width));
                own.narrow(2, width, 2 * width).copy_from(&keys);
                own
            }
        }
    }

    /// How long a rank's part of so many positions is.
    #[track_caller]
    pub(crate) fn stretch(&self, time: usize) -> usize {
        let n = self.count();
        assert!(time.is_multiple_of(n), "sequences of {time} positions don't fall into {n} equal stretches");
        time / n
    }
}

/// B, T and everything behind.
#[track_caller]
fn sequence(x: &Tensor) -> [usize; 3] {
    let &[batch, time, ..] = x.dims() else {
        panic!("a sequence of shape {}: (B, T, ...) would do", x.shape())
    };
    [batch, time, x.dims()[2..].iter().product()]
}

fn with_length(x: &Tensor, time: usize) -> Vec<usize> {
    let mut dims = x.dims().to_vec();
    dims[1] = time;
    dims
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_comm::Group;
    use phalanx_tensor::{DType, Device, Philox};

    /// Runs `f` as each of `n` ranks.
    fn ranks<R: Send>(n: usize, f: impl Fn(Ranks) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let groups = Group::threads(n).into_iter();
            let threads: Vec<_> = groups.map(|group| scope.spawn(|| f(Ranks::of(group)))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn random(device: &Device, dims: &[usize], stream: usize) -> Tensor {
        Tensor::uniform(device, dims, -1.0, 1.0, DType::F32, Philox::new(3, stream as u64))
    }

    #[test]
    fn values_of_16_bits_travel_as_they_are() {
        for dtype in [DType::BF16, DType::F16] {
            let whole = random(&Device::cpu(1), &[2, 6, 3], 1).cast(dtype);
            let all = ranks(3, |ranks| {
                let own = whole.narrow(1, ranks.rank() * 2, 2).contiguous();
                let gathered = ranks.moved(Move::Gather, &own);
                let summed = ranks.moved(Move::Sum, &Tensor::full(whole.device(), [2], 0.25, dtype));
                assert!(ranks.take_failure().is_none());
                (gathered, summed)
            });
            for (gathered, summed) in all {
                assert_eq!((gathered.dtype(), summed.dtype()), (dtype, dtype));
                let wide = |x: &Tensor| x.cast(DType::F32).to_vec::<f32>();
                assert_eq!((wide(&gathered), wide(&summed)), (wide(&whole), vec![0.75; 2]));
            }
        }
    }

    /// A linear map A over all ranks and its way back A': y A x = x A' y, summed over ranks.
    #[test]
    fn each_map_is_the_way_back_of_its_partner() {
        use Move::{Gather, GatherKeys, OwnRows, PadRows, Scatter, ScatterKeys, Sum};
        for n in [1, 2, 3] {
            for (forth, back, dims) in [
                (Gather, Scatter, vec![2, 4, 5]),
                (Scatter, Gather, vec![2, 6, 5]),
                (OwnRows, PadRows, vec![6, 5]),
                (Sum, Sum, vec![3, 2]),
                (GatherKeys, ScatterKeys, vec![2, 4, 6]),
            ] {
                let sums = ranks(n, |ranks| {
                    let device = Device::cpu(1);
                    let x = random(&device, &dims, ranks.rank());
                    let image = ranks.moved(forth, &x);
                    let y = random(&device, image.dims(), 10 + ranks.rank());
                    let grad = ranks.moved(back, &y);
                    assert_eq!(grad.dims(), x.dims());
                    assert!(ranks.take_failure().is_none());
                    [(&y * &image).sum_all().item(), (&x * &grad).sum_all().item()]
                });
                let [there, here] = [0, 1].map(|i| sums.iter().map(|sum| sum[i]).sum::<f64>());
                assert!((there - here).abs() < 1e-4, "{forth:?} over {n} ranks: {there} and {here}");
            }
        }
    }

    #[test]
    fn columns_of_all_ranks_stand_side_by_side_everywhere() {
        let device = Device::cpu(1);
        for dims in [&[3, 12][..], &[2, 3, 12]] {
            let whole = random(&device, dims, 5);
            for n in [1, 2, 3] {
                let (width, last) = (12 / n, dims.len() - 1);
                let of_rank = |ranks: Ranks| {
                    let own = whole.narrow(last, ranks.rank() * width, width).contiguous();
                    let all = ranks.side_by_side(&own);
                    assert_eq!(all.dims(), dims);
                    all.to_vec::<f32>()
                };
                assert!(ranks(n, of_rank).iter().all(|all| *all == whole.to_vec::<f32>()));
            }
        }
    }

    #[test]
    fn stretches_come_together_in_their_order() {
        let whole = random(&Device::cpu(1), &[2, 6, 3], 1);
        let all = ranks(3, |ranks| {
            let own = whole.narrow(1, ranks.rank() * 2, 2).contiguous();
            let gathered = ranks.moved(Move::Gather, &own).to_vec::<f32>();
            // Two others add nothing.
            let zeros = Tensor::zeros(whole.device(), [2, 6, 3], DType::F32);
            let given = if ranks.rank() == 1 { &whole } else { &zeros };
            (gathered, ranks.moved(Move::Scatter, given).to_vec::<f32>())
        });
        for (rank, (gathered, own)) in all.into_iter().enumerate() {
            assert_eq!(gathered, whole.to_vec::<f32>());
            assert_eq!(own, whole.narrow(1, rank * 2, 2).to_vec::<f32>());
        }
    }
}
