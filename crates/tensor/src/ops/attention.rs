//! Attention in one operation, which stores no scores, and the same in several, which says what it is.

use crate::autocast::lowers;
use crate::device::{Backend, Device};
use crate::gpu;
use crate::kernel;
use crate::op::Op;
use crate::ops::dropout::{DropoutKey, Within};
use crate::ops::{keep, recorded};
use crate::shape::Shape;
use crate::tensor::Tensor;
use std::ops::Range;

/// Dropout of shares.
#[derive(Clone, Copy)]
pub(crate) struct Dropped<'a> {
    /// With which probability.
    pub(crate) p: f64,
    /// What masks are a function of: seed, step and layer, and the number of each sample.
    pub(crate) key: [&'a Tensor; 2],
    /// Which of all heads that have masks is the first one here.
    pub(crate) first: usize,
}

/// Which keys queries see, by where both stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    /// Each sees all.
    All,
    /// None sees a later one. The first query here stands at this position.
    NotLater { from: usize },
}

impl Sight {
    /// The position of the first query.
    pub(crate) fn from(self) -> usize {
        match self {
            Sight::All => 0,
            Sight::NotLater { from } => from,
        }
    }

    /// How many positions have queries in the masks of dropout, where these see so many keys.
    pub(crate) fn queries(self, asking: usize, keys: usize) -> usize {
        match self {
            Sight::All => asking,
            Sight::NotLater { .. } => keys,
        }
    }
}

/// Which shares there are: by where queries and keys stand, by a mask that spreads to (B, H, T, S), in which 0 hides a key, and by dropout.
#[derive(Clone, Copy)]
pub(crate) struct Shares<'a> {
    pub(crate) sight: Sight,
    /// f32, a view of as many dimensions and elements.
    pub(crate) mask: Option<&'a Tensor>,
    pub(crate) dropped: Option<Dropped<'a>>,
}

/// Queries, keys and values of one tensor (B, T, 3 H D), as views (B, H, T, D) of them; of the queries those at these positions.
pub(crate) fn apart(qkv: &Tensor, heads: usize, queries: Range<usize>) -> [Tensor; 3] {
    let [q, k, v] = qkv.detach().three_of_heads(heads);
    [q.narrow(2, queries.start, queries.len()), k, v]
}

impl Tensor {
    /// Queries, keys and values that lie side by side, (B, T, 3 H D), as views (B, H, T, D).
    fn three_of_heads(&self, heads: usize) -> [Tensor; 3] {
        let &[batch, time, all] = self.dims() else {
            unreachable!("(B, T, 3 H D), checked by the operation")
        };
        let apart = self.reshape([batch, time, 3, heads, all / (3 * heads)]).permute(&[2, 0, 3, 1, 4]); // (3, B, H, T, D)
        [0, 1, 2].map(|i| apart.narrow(0, i, 1).squeeze(0))
    }

    /// This output, which lies as (B, T, H, D), as a view (B, H, T, D) like the queries that it came of.
    pub(crate) fn by_heads(&self, queries: &Tensor) -> Tensor {
        let &[b, h, t, d] = queries.dims() else { unreachable!("(B, H, T, D), checked by the operation") };
        self.detach().reshape([b, t, h, d]).transpose(1, 2)
    }
}

/// Room for the gradient of queries, keys or values (B, H, T, D), which lies as they do: with the numbers of a position's heads side by side,
/// or with the positions of a head.
pub(crate) fn room_like(of: &Tensor) -> Tensor {
    let &[b, h, t, d] = of.dims() else { unreachable!("(B, H, T, D), checked by the operation") };
    let stale = |shape: [usize; 4]| Tensor::stale(of.device(), shape.into(), of.dtype);
    if of.geometry.strides[1] < of.geometry.strides[2] {
        stale([b, t, h, d]).transpose(1, 2)
    } else {
        stale([b, h, t, d])
    }
}

/// The score of what isn't to be seen: far below all others, and a number, so that the softmax of nothing else is one too.
const HIDDEN: f64 = -1e30;

impl Tensor {
    /// Self-attention in which no position sees a later one. This tensor, (B, T, 3 W), holds queries, keys and values of `heads`
    /// heads side by side, as GPT-2's `c_attn` gives them; the result is (B, T, W). Each head's shares are the softmax of its scores
    /// over the square root of its W / `heads` numbers. With `dropout` a share is zero with that probability and divided by 1 minus
    /// it otherwise; the mask of a sample is that of [`Tensor::dropout`] for shares (B, heads, T, T), of which these may be some of the
    /// heads.
    ///
    /// The shares are never stored: neither memory nor what is kept for the backward pass grows with T^2. A GPU does so for heads of
    /// at most 256 numbers, and makes larger ones by [`Tensor::causal_attention_in_steps`].
    #[track_caller]
    pub fn causal_attention(&self, heads: usize, dropout: Option<(f64, &DropoutKey)>) -> Tensor {
        let [_, time, _] = self.check_heads("causal_attention", heads);
        self.causal_attention_of(0..time, heads, dropout)
    }

    /// As [`Tensor::causal_attention`], of the queries at these positions alone: (B, T, 3 W) to (B, Q, W). On a CPU each has the bits that
    /// it has among all. Other queries are never read.
    #[track_caller]
    pub fn causal_attention_of(
        &self,
        queries: Range<usize>,
        heads: usize,
        dropout: Option<(f64, &DropoutKey)>,
    ) -> Tensor {
        if let Some(dtype) = lowers([self]) {
            return self.lowered(dtype).causal_attention_of(queries, heads, dropout);
        }
        let [batch, time, width] = self.check_heads("causal_attention", heads);
        assert!(
            queries.start <= queries.end && queries.end <= time,
            "causal_attention: the queries at {queries:?} of {time} positions"
        );
        let dropout = check_dropout("causal_attention", dropout, [batch, heads]);
        if !has_kernels(self.device(), width / heads) {
            let all = self.causal_attention_in_steps(heads, dropout);
            return all.narrow(1, queries.start, queries.len());
        }
        let sight = Sight::NotLater { from: queries.start };
        self.attention_of_three(heads, queries, sight, None, dropout)
    }

    /// Attention of queries, keys and values that lie side by side, (B, T, 3 W), for the queries at these positions: (B, Q, W).
    fn attention_of_three(
        &self,
        heads: usize,
        queries: Range<usize>,
        sight: Sight,
        mask: Option<&Tensor>,
        dropout: Option<(f64, &DropoutKey)>,
    ) -> Tensor {
        let [batch, asking] = [self.dims()[0], queries.len()];
        let qkv = self.contiguous();
        let given = apart(&qkv, heads, queries);
        let out = [batch, asking, self.dims()[2] / 3].into();
        attended(given.each_ref(), out, sight, mask, dropout, &[&qkv])
    }

    /// As [`Tensor::causal_attention`], made of other operations: the definition that the kernel is held against. It stores all
    /// scores, several times.
    #[track_caller]
    pub fn causal_attention_in_steps(&self, heads: usize, dropout: Option<(f64, &DropoutKey)>) -> Tensor {
        let [_, time, _] = self.check_heads("causal_attention_in_steps", heads);
        let not_later = |i: usize| if i % time > i / time { 0.0f32 } else { 1.0 };
        let mask: Vec<f32> = (0..time * time).map(not_later).collect();
        self.self_attention_in_steps(
            heads,
            Some(&Tensor::constant(self.device(), &mask, [time, time])),
            dropout,
        )
    }

    /// [`Tensor::attention`] of the positions of each sample to each other: this tensor, (B, T, 3 W), holds queries, keys and values as for
    /// [`Tensor::causal_attention`], and the result is (B, T, W).
    #[track_caller]
    pub fn self_attention(
        &self,
        heads: usize,
        mask: Option<&Tensor>,
        dropout: Option<(f64, &DropoutKey)>,
    ) -> Tensor {
        if let Some(dtype) = lowers([self]) {
            return self.lowered(dtype).self_attention(heads, mask, dropout);
        }
        let [batch, time, width] = self.check_heads("self_attention", heads);
        let dropout = check_dropout("self_attention", dropout, [batch, heads]);
        let shape = [batch, heads, time, time];
        let mask = mask.map(|mask| hiding("self_attention", mask, shape));
        if !has_kernels(self.device(), width / heads) {
            return self.self_attention_in_steps(heads, mask.as_ref(), dropout);
        }
        let mask = mask.map(|mask| mask.broadcast_to(shape));
        self.attention_of_three(heads, 0..time, Sight::All, mask.as_ref(), dropout)
    }

    /// The same, made of other operations: see [`Tensor::attention_in_steps`].
    #[track_caller]
    pub fn self_attention_in_steps(
        &self,
        heads: usize,
        mask: Option<&Tensor>,
        dropout: Option<(f64, &DropoutKey)>,
    ) -> Tensor {
        let [batch, time, width] = self.check_heads("self_attention_in_steps", heads);
        let [q, k, v] = self.three_of_heads(heads);
        q.attention_in_steps(&k, &v, mask, dropout).transpose(1, 2).reshape([batch, time, width])
    }

    /// Attention of these queries, (B, H, T, D), to keys (B, H, S, D) with values (B, H, S, E): (B, H, T, E). The shares of each query are
    /// the softmax of its products with the keys over the square root of D. Of keys for which the mask, which spreads to (B, H, T, S),
    /// is 0 the share is 0; a query that may see none has zeros. Dropout is as in [`Tensor::causal_attention`].
    ///
    /// The shares are never stored, as in [`Tensor::causal_attention`], where values have as many numbers as keys, on a GPU at most 256;
    /// else it is [`Tensor::attention_in_steps`]. A mask in f32 is kept for the backward pass where it lies, so it stays as it is until then.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// let device = Device::cpu(1);
    /// // One head of one number: two queries, and three positions of which the last fills up the sample.
    /// let ids = Tensor::from_slice(&device, &[7i64, 8, 0], [1, 1, 1, 3]);
    /// let of = |values: &[f32]| Tensor::from_slice(&device, values, [1, 1, values.len(), 1]);
    /// let y = of(&[0.0, 100.0]).attention(&of(&[0.0, 1.0, 9.0]), &of(&[2.0, 4.0, 6.0]), Some(&ids.ne(0.0)), None);
    /// assert_eq!(y.to_vec::<f32>(), [3.0, 4.0]);
    /// ```
    #[track_caller]
    pub fn attention(
        &self,
        keys: &Tensor,
        values: &Tensor,
        mask: Option<&Tensor>,
        dropout: Option<(f64, &DropoutKey)>,
    ) -> Tensor {
        let [b, h, t, s, d, e] = self.check_attention(keys, values);
        if d != e || !has_kernels(self.device(), d) {
            return self.attention_in_steps(keys, values, mask, dropout);
        }
        if let Some(dtype) = lowers([self, keys, values]) {
            let [queries, keys, values] = [self, keys, values].map(|x| x.lowered(dtype));
            return queries.attention(&keys, &values, mask, dropout);
        }
        let dropout = check_dropout("attention", dropout, [b, h]);
        let mask = mask.map(|mask| hiding("attention", mask, [b, h, t, s]).broadcast_to([b, h, t, s]));
        [keys, values].iter().for_each(|x| self.check_partner("attention", x));
        let of = [self, keys, values].map(Tensor::with_whole_rows);
        let (of, out) = (of.each_ref(), [b, t, h, d].into());
        let out = attended(of.map(Tensor::detach).each_ref(), out, Sight::All, mask.as_ref(), dropout, &of);
        out.transpose(1, 2)
    }

    /// As [`Tensor::attention`], made of other operations: the definition that the kernels are held against. It stores all scores, several
    /// times.
    #[track_caller]
    pub fn attention_in_steps(
        &self,
        keys: &Tensor,
        values: &Tensor,
        mask: Option<&Tensor>,
        dropout: Option<(f64, &DropoutKey)>,
    ) -> Tensor {
        let [b, h, t, s, d, _] = self.check_attention(keys, values);
        // Of floats of 16 bits the scores are rounded once, and so are the shares.
        let scores = self.matmul(&keys.t()).widened() / (d as f64).sqrt(); // (B, H, T, S)
        let shares = match mask {
            Some(mask) => {
                let hidden = hiding("attention", mask, [b, h, t, s]).eq(0.0);
                scores.masked_fill(&hidden, HIDDEN).softmax(3).masked_fill(&hidden, 0.0)
            }
            None => scores.softmax(3),
        };
        let shares = match dropout {
            Some((p, key)) => shares.dropout(p, key),
            None => shares,
        };
        shares.cast(values.dtype).matmul(values)
    }

    /// B, H, T, S, D and E of queries (B, H, T, D), keys (B, H, S, D) and values (B, H, S, E).
    #[track_caller]
    fn check_attention(&self, keys: &Tensor, values: &Tensor) -> [usize; 6] {
        let (&[b, h, t, d], &[.., s, e]) = (self.dims(), values.dims()) else {
            panic!(
                "attention: queries of shape {} to values of shape {}: (B, H, T, D) would do",
                self.shape(),
                values.shape()
            )
        };
        assert!(
            keys.dims() == [b, h, s, d] && values.dims()[..3] == [b, h, s],
            "attention: queries of shape {} to keys of shape {} with values of shape {}: (B, H, T, D), (B, H, S, D) and (B, H, S, E) \
             would do",
            self.shape(),
            keys.shape(),
            values.shape()
        );
        [b, h, t, s, d, e]
    }

    /// This, or a copy, in which the numbers of a row, the last dimension, are neighbours.
    fn with_whole_rows(&self) -> Tensor {
        let last = self.shape().n_dims() - 1;
        if self.dims()[last] <= 1 || self.geometry.strides[last] == 1 {
            self.clone()
        } else {
            self.contiguous()
        }
    }

    /// B, T and W of queries, keys and values (B, T, 3 W) of so many heads.
    #[track_caller]
    fn check_heads(&self, op: &str, heads: usize) -> [usize; 3] {
        match *self.dims() {
            [batch, time, all] if heads > 0 && all.is_multiple_of(3 * heads) => [batch, time, all / 3],
            _ => panic!(
                "{op}: queries, keys and values of shape {} for {heads} heads: (B, T, 3 W) with W a multiple of the heads would do",
                self.shape()
            ),
        }
    }
}

/// The dropout, unless it is none.
#[track_caller]
fn check_dropout<'a>(
    op: &str,
    dropout: Option<(f64, &'a DropoutKey)>,
    [batch, heads]: [usize; 2],
) -> Option<(f64, &'a DropoutKey)> {
    let (p, key) = dropout?;
    assert!((0.0..1.0).contains(&p), "{op}: the probability must lie in [0, 1), got {p}");
    assert!(key.samples.len() == batch, "{op}: {} sample ids for {batch} samples", key.samples.len());
    if let Some(within @ Within { dim, start, of }) = key.within {
        assert!(dim == 1 && start + heads <= of, "{op}: shares of {heads} heads as the part {within:?}");
    }
    (p > 0.0).then_some((p, key))
}

/// The mask in f32. Panics unless it spreads to this shape.
#[track_caller]
fn hiding(op: &str, mask: &Tensor, shape: [usize; 4]) -> Tensor {
    let shape = Shape::new(&shape);
    assert!(
        mask.shape().broadcast(&shape) == Some(shape),
        "{op}: a mask of shape {} for scores of shape {shape}: one of the keys of each sample would be {}",
        mask.shape(),
        Shape::new(&[shape.dims()[0], 1, 1, shape.dims()[3]])
    );
    mask.as_mask()
}

/// Whether the device has kernels for heads of so many numbers.
fn has_kernels(device: &Device, depth: usize) -> bool {
    matches!(device.backend(), Backend::Cpu) || depth <= gpu::attention::MOST_DEPTH
}

/// The output, of this shape, which is that of (B, T, H, D): of queries, keys and values (B, H, T, D), which are views of `inputs`.
#[track_caller]
fn attended(
    given: [&Tensor; 3],
    shape: Shape,
    sight: Sight,
    mask: Option<&Tensor>,
    dropout: Option<(f64, &DropoutKey)>,
    inputs: &[&Tensor],
) -> Tensor {
    let (device, dtype) = (given[0].device(), given[0].dtype);
    let &[batch, heads, asking, _] = given[0].dims() else {
        unreachable!("(B, H, T, D), checked by the operation")
    };
    // On a GPU they are new in each replay of a pass.
    let key = dropout.map(|(_, key)| device.feed_key(key));
    let out = Tensor::stale(device, shape, dtype);
    let lse = Tensor::stale(device, [batch, heads, asking].into(), dtype.wide());
    let first = dropout.and_then(|(_, key)| key.within).map_or(0, |within| within.start);
    let p = dropout.map_or(0.0, |(p, _)| p);
    let dropped = key.as_ref().map(|[words, samples]| Dropped { p, key: [words, samples], first });
    kernel::attention::attention(given, Shares { sight, mask, dropped }, &out, &lse);
    recorded(out, Op::Attention { sight, first, dropout: p }, inputs, |out| {
        let [words, samples] = key.map_or([None, None], |key| key.map(Some));
        let input = |i: usize| inputs.get(i).and_then(|x| keep(x));
        [input(0), keep(out), keep(&lse), words, samples, mask.cloned(), input(1), input(2)]
    })
}
