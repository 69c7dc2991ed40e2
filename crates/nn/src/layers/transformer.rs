//! Attention of several heads, and the layers of an encoder and a decoder, with PyTorch's names, so that its weights fit: Vaswani, Shazeer,
//! Parmar, Uszkoreit, Jones, Gomez, Kaiser and Polosukhin, "Attention Is All You Need", 2017.
//!
//! Shapes: B samples, T positions, W numbers a position.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use crate::{Dropout, LayerNorm, Linear};
use phalanx_tensor::Tensor;

/// Attention of several heads, of positions to each other, (B, T, W) to the same, or to those of something else. Parameters
/// `in_proj_weight` (3 W, W), `in_proj_bias` (3 W), `out_proj.weight` (W, W) and `out_proj.bias` (W), as PyTorch starts them.
///
/// # Masks
/// A mask, here and in the layers of encoders and decoders, is 0 where a position may not be seen and anything else where it may, and
/// spreads to (B, heads, T, T), to something else to (B, heads, T, S): for samples that are filled up by an id `PAD`,
/// `ids.ne(PAD).reshape([b, 1, 1, t])`; where none may see a later one, `Tensor::ones(&device, [t, t], DType::F32).tril(0)`; the product of two
/// for both. PyTorch's masks are others: its `key_padding_mask` is true where a position may *not* be seen (`mask.eq(0.0)` turns one
/// around), and its `attn_mask` in floats is added to the scores.
///
/// ```
/// use phalanx_nn::{Ctx, Module, MultiheadAttention, Parameters};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = MultiheadAttention::new(8, 2, 0.0);
/// let parameters = Parameters::build(&mut layer, &device, 0);
/// assert_eq!(parameters.names()[..2], ["in_proj_weight", "in_proj_bias"]);
/// let x = Tensor::ones(&device, [2, 5, 8], DType::F32);
/// assert_eq!(layer.forward(&x, &mut Ctx::eval()).dims(), [2, 5, 8]);
/// ```
pub struct MultiheadAttention {
    in_proj_weight: Param,
    in_proj_bias: Param,
    out_proj: Linear,
    heads: usize,
    dropout: f64,
}

impl MultiheadAttention {
    /// Of `width` numbers in `heads` heads, whose shares are zeroed with probability `dropout` in training. Panics unless the heads divide
    /// the width and the probability lies in [0, 1).
    #[track_caller]
    pub fn new(width: usize, heads: usize, dropout: f64) -> MultiheadAttention {
        assert!(
            heads > 0 && width.is_multiple_of(heads),
            "MultiheadAttention: a width of {width} doesn't fall into {heads} heads"
        );
        assert!((0.0..1.0).contains(&dropout), "dropout: p must lie in [0, 1), got {dropout}");
        // Xavier's bound of a matrix between W and 3 W numbers.
        let bound = (6.0 / (4 * width) as f64).sqrt();
        MultiheadAttention {
            in_proj_weight: Param::new([3 * width, width], Init::Uniform { bound }),
            in_proj_bias: Param::new([3 * width], Init::Constant(0.0)),
            out_proj: Linear::new(width, width).with_zero_bias(),
            heads,
            dropout,
        }
    }

    /// The same where positions see those alone that the mask shows: see [`MultiheadAttention`].
    #[track_caller]
    pub fn forward_masked(&self, x: &Tensor, mask: Option<&Tensor>, ctx: &mut Ctx) -> Tensor {
        self.check(x, "(B, T, W)");
        let qkv = x.linear(&self.in_proj_weight, Some(&self.in_proj_bias)); // (B, T, 3 W)
        let key = (ctx.training() && self.dropout > 0.0).then(|| ctx.dropout_key());
        let dropout = key.as_ref().map(|key| (self.dropout, key));
        self.out_proj.forward(&qkv.self_attention(self.heads, mask, dropout), ctx)
    }

    /// The positions of `x`, (B, T, W), look at those of `memory`, (B, S, W): (B, T, W). The mask spreads to (B, heads, T, S), and
    /// shows the positions that may be seen: see [`MultiheadAttention`].
    ///
    /// ```
    /// use phalanx_nn::{Ctx, MultiheadAttention, Parameters};
    /// use phalanx_tensor::{DType, Device, Tensor};
    ///
    /// let device = Device::cpu(1);
    /// let mut layer = MultiheadAttention::new(8, 2, 0.0);
    /// let _parameters = Parameters::build(&mut layer, &device, 0);
    /// let [x, memory] = [5, 3].map(|positions| Tensor::ones(&device, [2, positions, 8], DType::F32));
    /// assert_eq!(layer.forward_to(&x, &memory, None, &mut Ctx::eval()).dims(), [2, 5, 8]);
    /// ```
    #[track_caller]
    pub fn forward_to(&self, x: &Tensor, memory: &Tensor, mask: Option<&Tensor>, ctx: &mut Ctx) -> Tensor {
        self.check(x, "(B, T, W)");
        self.check(memory, "(B, S, W)");
        let (&[b, t, w], &[samples, s, _]) = (x.dims(), memory.dims()) else { unreachable!("checked") };
        assert!(
            samples == b,
            "MultiheadAttention: {b} samples of shape {} that look at {samples} of shape {}: as many would do",
            x.shape(),
            memory.shape()
        );
        let part = |first: usize, n: usize| {
            let narrow = |param: &Param| param.narrow(0, first * w, n * w);
            (narrow(&self.in_proj_weight), narrow(&self.in_proj_bias))
        };
        let ((to_queries, of_queries), (to_rest, of_rest)) = (part(0, 1), part(1, 2));
        let (heads, depth) = (self.heads, w / self.heads);
        let queries = x.linear(&to_queries, Some(&of_queries)).reshape([b, t, heads, depth]).transpose(1, 2);
        let rest = memory.linear(&to_rest, Some(&of_rest)).reshape([b, s, 2, heads, depth]);
        let rest = rest.permute(&[2, 0, 3, 1, 4]); // (2, B, H, S, D)
        let [keys, values] = [0, 1].map(|i| rest.narrow(0, i, 1).squeeze(0));
        let key = (ctx.training() && self.dropout > 0.0).then(|| ctx.dropout_key());
        let dropout = key.as_ref().map(|key| (self.dropout, key));
        let seen = queries.attention(&keys, &values, mask, dropout);
        self.out_proj.forward(&seen.transpose(1, 2).reshape([b, t, w]), ctx)
    }
}

impl MultiheadAttention {
    /// Panics unless this is what the layer takes.
    #[track_caller]
    fn check(&self, x: &Tensor, wanted: &str) {
        let width = self.in_proj_weight.dims()[1];
        assert!(
            x.shape().n_dims() == 3 && x.dims()[2] == width,
            "MultiheadAttention: an input of shape {} for a layer of width {width}: {wanted} with a W of {width} would do",
            x.shape()
        );
    }
}

impl Module for MultiheadAttention {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.forward_masked(x, None, ctx)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("in_proj_weight", &mut self.in_proj_weight);
        v.param("in_proj_bias", &mut self.in_proj_bias);
        v.child("out_proj", &mut self.out_proj);
    }
}

/// What a [`TransformerEncoderLayer`] or a [`TransformerDecoderLayer`] is like.
#[derive(Clone, Copy, Debug)]
pub struct TransformerLayerConfig {
    /// Numbers a position. Default 512.
    pub width: usize,
    /// Heads of the attention; they divide the width. Default 8.
    pub heads: usize,
    /// Numbers a position between the two dense layers. Default 2048.
    pub hidden: usize,
    /// The share of values that dropout zeroes: of the shares of attention, of the hidden numbers, and of what each part adds. Default 0.1.
    pub dropout: f64,
    /// What is done to the hidden numbers. Default: ReLU.
    pub activation: fn(&Tensor) -> Tensor,
    /// Whether each part normalises what comes in, and not what it and that come to. Default no.
    pub norm_first: bool,
    /// What normalisations add to variances. Default 1e-5.
    pub eps: f64,
}

impl Default for TransformerLayerConfig {
    fn default() -> TransformerLayerConfig {
        TransformerLayerConfig {
            width: 512,
            heads: 8,
            hidden: 2048,
            dropout: 0.1,
            activation: Tensor::relu,
            norm_first: false,
            eps: 1e-5,
        }
    }
}

/// Attention and then two dense layers, each added to what came in: (B, T, W) to the same. Parameters are named `self_attn`, `linear1`,
/// `linear2`, `norm1` and `norm2`.
///
/// ```
/// use phalanx_nn::{Ctx, TransformerLayerConfig, Module, Parameters, TransformerEncoderLayer};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let config = TransformerLayerConfig { width: 8, heads: 2, hidden: 16, ..TransformerLayerConfig::default() };
/// let mut layer = TransformerEncoderLayer::new(config);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let ids = Tensor::from_slice(&device, &[3i64, 4, 0, 5, 0, 0], [2, 3]);
/// let (x, mask) = (Tensor::ones(&device, [2, 3, 8], DType::F32), ids.ne(0.0).reshape([2, 1, 1, 3]));
/// assert_eq!(layer.forward_masked(&x, Some(&mask), &mut Ctx::eval()).dims(), [2, 3, 8]);
/// ```
pub struct TransformerEncoderLayer {
    self_attn: MultiheadAttention,
    linear1: Linear,
    dropout: Dropout,
    linear2: Linear,
    norm1: LayerNorm,
    norm2: LayerNorm,
    dropout1: Dropout,
    dropout2: Dropout,
    activation: fn(&Tensor) -> Tensor,
    norm_first: bool,
}

impl TransformerEncoderLayer {
    /// The layer. Panics as [`MultiheadAttention::new`] does.
    #[track_caller]
    pub fn new(config: TransformerLayerConfig) -> TransformerEncoderLayer {
        let TransformerLayerConfig { width, heads, hidden, dropout, activation, norm_first, eps } = config;
        TransformerEncoderLayer {
            self_attn: MultiheadAttention::new(width, heads, dropout),
            linear1: Linear::new(width, hidden),
            dropout: Dropout::new(dropout),
            linear2: Linear::new(hidden, width),
            norm1: LayerNorm::new(width).eps(eps),
            norm2: LayerNorm::new(width).eps(eps),
            dropout1: Dropout::new(dropout),
            dropout2: Dropout::new(dropout),
            activation,
            norm_first,
        }
    }

    /// The same where positions see those alone that the mask shows: see [`MultiheadAttention`].
    #[track_caller]
    pub fn forward_masked(&self, x: &Tensor, mask: Option<&Tensor>, ctx: &mut Ctx) -> Tensor {
        if self.norm_first {
            let x = x + self.attended(&self.norm1.forward(x, ctx), mask, ctx);
            return &x + self.fed_forward(&self.norm2.forward(&x, ctx), ctx);
        }
        let x = self.norm1.forward(&(x + self.attended(x, mask, ctx)), ctx);
        self.norm2.forward(&(&x + self.fed_forward(&x, ctx)), ctx)
    }

    fn attended(&self, x: &Tensor, mask: Option<&Tensor>, ctx: &mut Ctx) -> Tensor {
        self.dropout1.forward(&self.self_attn.forward_masked(x, mask, ctx), ctx)
    }

    fn fed_forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let hidden = (self.activation)(&self.linear1.forward(x, ctx));
        self.dropout2.forward(&self.linear2.forward(&self.dropout.forward(&hidden, ctx), ctx), ctx)
    }
}

impl Module for TransformerEncoderLayer {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.forward_masked(x, None, ctx)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("self_attn", &mut self.self_attn);
        v.child("linear1", &mut self.linear1);
        v.child("dropout", &mut self.dropout);
        v.child("linear2", &mut self.linear2);
        v.child("norm1", &mut self.norm1);
        v.child("norm2", &mut self.norm2);
        v.child("dropout1", &mut self.dropout1);
        v.child("dropout2", &mut self.dropout2);
    }
}

/// Attention to each other, attention to what an encoder made of something else, and then two dense layers, each added to what came in: (B,
/// T, W) and (B, S, W) to (B, T, W). Parameters are named `self_attn`, `multihead_attn`, `linear1`, `linear2`, `norm1`, `norm2` and `norm3`.
///
/// ```
/// use phalanx_nn::{Ctx, Parameters, TransformerDecoderLayer, TransformerLayerConfig};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let config = TransformerLayerConfig { width: 8, heads: 2, hidden: 16, ..TransformerLayerConfig::default() };
/// let mut layer = TransformerDecoderLayer::new(config);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let [x, memory] = [3, 5].map(|positions| Tensor::ones(&device, [2, positions, 8], DType::F32));
/// // No position sees a later one.
/// let causal = Tensor::ones(&device, [3, 3], DType::F32).tril(0);
/// let y = layer.forward_to(&x, &memory, [Some(&causal), None], &mut Ctx::eval());
/// assert_eq!(y.dims(), [2, 3, 8]);
/// ```
pub struct TransformerDecoderLayer {
    self_attn: MultiheadAttention,
    multihead_attn: MultiheadAttention,
    linear1: Linear,
    dropout: Dropout,
    linear2: Linear,
    norm1: LayerNorm,
    norm2: LayerNorm,
    norm3: LayerNorm,
    dropout1: Dropout,
    dropout2: Dropout,
    dropout3: Dropout,
    activation: fn(&Tensor) -> Tensor,
    norm_first: bool,
}

impl TransformerDecoderLayer {
    /// The layer. Panics as [`MultiheadAttention::new`] does.
    #[track_caller]
    pub fn new(config: TransformerLayerConfig) -> TransformerDecoderLayer {
        let TransformerLayerConfig { width, heads, hidden, dropout, activation, norm_first, eps } = config;
        TransformerDecoderLayer {
            self_attn: MultiheadAttention::new(width, heads, dropout),
            multihead_attn: MultiheadAttention::new(width, heads, dropout),
            linear1: Linear::new(width, hidden),
            dropout: Dropout::new(dropout),
            linear2: Linear::new(hidden, width),
            norm1: LayerNorm::new(width).eps(eps),
            norm2: LayerNorm::new(width).eps(eps),
            norm3: LayerNorm::new(width).eps(eps),
            dropout1: Dropout::new(dropout),
            dropout2: Dropout::new(dropout),
            dropout3: Dropout::new(dropout),
            activation,
            norm_first,
        }
    }

    /// The output for `x` beside `memory`, with the masks of what positions see of each other, and of the memory: see
    /// [`MultiheadAttention`].
    #[track_caller]
    pub fn forward_to(
        &self,
        x: &Tensor,
        memory: &Tensor,
        masks: [Option<&Tensor>; 2],
        ctx: &mut Ctx,
    ) -> Tensor {
        type Part<'a> = &'a dyn Fn(&Tensor, &mut Ctx) -> Tensor;
        let to_each_other = |x: &Tensor, ctx: &mut Ctx| {
            self.dropout1.forward(&self.self_attn.forward_masked(x, masks[0], ctx), ctx)
        };
        let to_memory = |x: &Tensor, ctx: &mut Ctx| {
            self.dropout2.forward(&self.multihead_attn.forward_to(x, memory, masks[1], ctx), ctx)
        };
        let fed_forward = |x: &Tensor, ctx: &mut Ctx| {
            let hidden = (self.activation)(&self.linear1.forward(x, ctx));
            self.dropout3.forward(&self.linear2.forward(&self.dropout.forward(&hidden, ctx), ctx), ctx)
        };
        let parts: [(Part<'_>, &LayerNorm); 3] =
            [(&to_each_other, &self.norm1), (&to_memory, &self.norm2), (&fed_forward, &self.norm3)];
        parts.into_iter().fold(x.clone(), |x, (part, norm)| match self.norm_first {
            true => &x + part(&norm.forward(&x, ctx), ctx),
            false => norm.forward(&(&x + part(&x, ctx)), ctx),
        })
    }
}

impl Module for TransformerDecoderLayer {
    /// Panics: it has nothing to look at. [`TransformerDecoderLayer::forward_to`] is what a model calls.
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        panic!("TransformerDecoderLayer: {} without a memory to look at: `forward_to` takes both", x.shape())
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("self_attn", &mut self.self_attn);
        v.child("multihead_attn", &mut self.multihead_attn);
        v.child("linear1", &mut self.linear1);
        v.child("dropout", &mut self.dropout);
        v.child("linear2", &mut self.linear2);
        v.child("norm1", &mut self.norm1);
        v.child("norm2", &mut self.norm2);
        v.child("norm3", &mut self.norm3);
        v.child("dropout1", &mut self.dropout1);
        v.child("dropout2", &mut self.dropout2);
        v.child("dropout3", &mut self.dropout3);
    }
}
