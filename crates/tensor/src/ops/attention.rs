//! Attention: causal self-attention in one operation, and any other in several.

use crate::autocast::lowers;
use crate::device::Backend;
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

/// Which queries an attention is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// In how many heads.
    pub(crate) heads: usize,
    /// The position of the first.
    pub(crate) from: usize,
    /// At how many positions.
    pub(crate) asking: usize,
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
        let (from, asking) = (queries.start, queries.len());
        if matches!(self.device().backend(), Backend::Gpu(_)) && width / heads > gpu::attention::MOST_DEPTH {
            return self.causal_attention_in_steps(heads, dropout).narrow(1, from, asking);
        }
        let asked = Asked { heads, from, asking };
        let qkv = self.contiguous();
        // On a GPU they are new in each replay of a pass.
        let key = dropout.map(|(_, key)| self.device().feed_key(key));
        let out = Tensor::stale(self.device(), [batch, asking, width].into(), self.dtype);
        let lse = Tensor::stale(self.device(), [batch, heads, asking].into(), self.dtype.wide());
        let first = dropout.and_then(|(_, key)| key.within).map_or(0, |within| within.start);
        let p = dropout.map_or(0.0, |(p, _)| p);
        let dropped = key.as_ref().map(|[words, samples]| Dropped { p, key: [words, samples], first });
        kernel::attention::attention(&qkv, asked, dropped, &out, &lse);
        let op = Op::CausalAttention { asked, first, dropout: p };
        recorded(out, op, &[&qkv], |out| {
            let [words, samples] = key.map_or([None, None], |key| key.map(Some));
            [keep(&qkv), keep(out), keep(&lse), words, samples]
        })
    }

    /// As [`Tensor::causal_attention`], made of other operations: the definition that the kernel is held against. It stores all
    /// scores, several times.
    #[track_caller]
    pub fn causal_attention_in_steps(&self, heads: usize, dropout: Option<(f64, &DropoutKey)>) -> Tensor {
        let [_, time, _] = self.check_heads("causal_attention_in_steps", heads);
        let not_later = |i: usize| if i % time > i / time { 0.0f32 } else { 1.0 };
        let mask: Vec<f32> = (0..time * time).map(not_later).collect();
        self.self_attention(heads, Some(&Tensor::constant(self.device(), &mask, [time, time])), dropout)
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
        let [batch, time, width] = self.check_heads("self_attention", heads);
        let apart = self.reshape([batch, time, 3, heads, width / heads]).permute(&[2, 0, 3, 1, 4]); // (3, B, H, T, D)
        let [q, k, v] = [0, 1, 2].map(|i| apart.narrow(0, i, 1).squeeze(0));
        q.attention(&k, &v, mask, dropout).transpose(1, 2).reshape([batch, time, width])
    }

    /// Attention of these queries, (B, H, T, D), to keys (B, H, S, D) with values (B, H, S, E): (B, H, T, E). The shares of each query are
    /// the softmax of its products with the keys over the square root of D. Of keys for which the mask, f32 that spreads to (B, H, T, S),
    /// is 0 the share is 0; a query that may see none has zeros. Dropout is as in [`Tensor::causal_attention`].
    ///
    /// It is made of other operations, and stores all scores, several times: causal self-attention is better made in one.
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
        let (&[b, h, t, d], &[.., s, _]) = (self.dims(), values.dims()) else {
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
        // Of floats of 16 bits the scores are rounded once, and so are the shares.
        let scores = self.matmul(&keys.t()).widened() / (d as f64).sqrt(); // (B, H, T, S)
        let shares = match mask {
            Some(mask) => {
                assert!(
                    mask.shape().broadcast(scores.shape()) == Some(*scores.shape()),
                    "attention: a mask of shape {} for scores of shape {}",
                    mask.shape(),
                    Shape::new(&[b, h, t, s])
                );
                let hidden = mask.eq(0.0);
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
