//! The decoder of GPT-2: Radford, Wu, Child, Luan, Amodei and Sutskever, "Language Models are Unsupervised Multitask Learners", 2019,
//! with the names and layouts of its files, so that these fit.
//!
//! Shapes: B samples, T positions, W numbers a position, V words.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use crate::row::{Block, Row};
use crate::seam::Seam;
use crate::{Dropout, Embedding, LayerNorm, LinearInOut, Weights, module};
use phalanx_tensor::{DropoutKey, Tensor};

/// The sizes of a [`Gpt`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptConfig {
    /// Decoder blocks. Default 12, as all defaults those of the smallest GPT-2.
    pub layers: usize,
    /// Numbers a position. Default 768.
    pub width: usize,
    /// Heads of each attention; they divide the width. Default 12.
    pub heads: usize,
    /// The most positions. Default 1024.
    pub context: usize,
    /// Words. Default 50257.
    pub vocabulary: usize,
    /// The share of values that dropout zeroes: of the embeddings, of the shares of attention, and of what each half of a block adds.
    /// Default 0.1.
    pub dropout: f64,
    /// What the last layer multiplies with. Default: the table of words.
    pub head: Head,
}

/// The weight of a [`Gpt`]'s last layer, (V, W).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Head {
    /// The table of the words' embeddings, `wte.weight`.
    #[default]
    Tied,
    /// One of its own, `lm_head.weight`.
    Own,
}

impl Default for GptConfig {
    fn default() -> GptConfig {
        GptConfig {
            layers: 12,
            width: 768,
            heads: 12,
            context: 1024,
            vocabulary: 50257,
            dropout: 0.1,
            head: Head::Tied,
        }
    }
}

/// The standard deviation that weights start with.
const STD: f64 = 0.02;

impl GptConfig {
    /// That of the layers that end a branch: their sums over all blocks then start as large as a single one's.
    fn std_of_branch(&self) -> f64 {
        STD / (2.0 * self.layers.max(1) as f64).sqrt()
    }
}

/// The decoder: ids of words, i64 (B, T), to logits (B, T, V) of the word that follows each. It is a row of blocks: `embedding`,
/// `h.0`, `h.1` and so on, and `head`.
///
/// ```
/// use phalanx_nn::models::{Gpt, GptConfig};
/// use phalanx_nn::{Ctx, Module, Parameters};
/// use phalanx_tensor::{Device, Tensor};
///
/// let config = GptConfig { layers: 2, width: 8, heads: 2, context: 16, vocabulary: 256, ..GptConfig::default() };
/// let mut gpt = Gpt::new(config);
/// let device = Device::cpu(1);
/// let parameters = Parameters::build(&mut gpt, &device, 0);
/// assert_eq!(parameters.names()[..4], ["wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias"]);
/// let ids = Tensor::from_slice(&device, &[1i64, 2, 3, 4, 5, 6], [2, 3]);
/// assert_eq!(gpt.forward(&ids, &mut Ctx::eval()).dims(), [2, 3, 256]);
/// ```
pub struct Gpt(Row);

impl Gpt {
    /// The model, whose parameters get values from `Parameters::build`. Panics unless the heads divide the width.
    #[track_caller]
    pub fn new(config: GptConfig) -> Gpt {
        let GptConfig { layers, width, heads, .. } = config;
        assert!(
            heads > 0 && width.is_multiple_of(heads),
            "Gpt: a width of {width} doesn't fall into {heads} heads"
        );
        let row = Row::new().then(Block::unprefixed("embedding", Embeddings::new(config)));
        let row =
            (0..layers).fold(row, |row, i| row.then(Block::new(&format!("h.{i}"), Decoder::new(config))));
        Gpt(row.then(Block::unprefixed("head", Logits::new(config))))
    }

    /// The arrays of a file of a GPT-2 as others write it, named as this model names them: without the `transformer.` that names begin
    /// with in a file of the model with its last layer, without the masks that some files hold beside the weights, and where the
    /// head is tied without its copy of the table of words.
    pub fn weights_of(file: &Weights, head: Head) -> Weights {
        let mut weights = Weights::default();
        for name in file.names() {
            let own = name.strip_prefix("transformer.").unwrap_or(name);
            let is_mask = own.ends_with(".attn.bias") || own.ends_with(".attn.masked_bias");
            let is_copy = head == Head::Tied && own == "lm_head.weight";
            if let Some((shape, values)) = file.get(name).filter(|_| !is_mask && !is_copy) {
                weights.push(own.to_owned(), *shape, values);
            }
        }
        weights
    }

    /// Its blocks, with their names.
    pub fn row(&self) -> &Row {
        &self.0
    }
}

impl Module for Gpt {
    fn forward(&self, ids: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.0.forward(ids, ctx)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        self.0.visit(v);
    }

    fn blocks(&self) -> usize {
        self.0.blocks()
    }

    fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.0.forward_block(block, x, ctx)
    }

    fn block_of(&self, name: &str) -> usize {
        self.0.block_of(name)
    }

    fn shared_by(&self, name: &str) -> Vec<usize> {
        self.0.shared_by(name)
    }
}

/// A table of vectors as GPT-2 starts it.
fn table(rows: usize, width: usize) -> Embedding {
    Embedding::new(rows, width).init(Init::Normal { std: STD })
}

module! {
    /// Words and positions as vectors: (B, T) to (B, T, W).
    struct Embeddings(config: GptConfig) {
        wte: Embedding = table(config.vocabulary, config.width),
        wpe: Embedding = table(config.context, config.width),
        drop: Dropout = Dropout::new(config.dropout),
    }

    fn forward(&self, ids: &Tensor, ctx: &mut Ctx) -> Tensor {
        let &[_, time] = ids.dims() else { panic!("Gpt: ids of shape {}: (B, T) would do", ids.shape()) };
        let positions = self.wpe.first(time); // (T, W)
        self.drop.forward(&(self.wte.forward(ids, ctx) + positions), ctx)
    }
}

module! {
    /// Self-attention in which no position sees a later one: (B, T, W) to the same.
    struct CausalAttention(config: GptConfig) {
        c_attn: LinearInOut = LinearInOut::new(config.width, 3 * config.width, STD),
        c_proj: LinearInOut = LinearInOut::new(config.width, config.width, config.std_of_branch()),
        heads: Heads = Heads::new(config),
        drop: Dropout = Dropout::new(config.dropout),
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let qkv = self.c_attn.forward(x, ctx); // (B, T, 3 W)
        let y = self.heads.forward(&qkv, ctx); // (B, T, W)
        self.drop.forward(&self.c_proj.forward(&y, ctx), ctx)
    }
}

/// What is done to queries, keys and values: (B, T, 3 W) to (B, T, W).
struct Heads {
    /// Numbers a head. Of its heads there may be a part.
    depth: usize,
    dropout: f64,
    seam: Seam,
}

impl Heads {
    fn new(GptConfig { width, heads, dropout, .. }: GptConfig) -> Heads {
        Heads { depth: width / heads, dropout, seam: Seam::default() }
    }
}

impl Module for Heads {
    fn forward(&self, qkv: &Tensor, ctx: &mut Ctx) -> Tensor {
        let key = (ctx.training() && self.dropout > 0.0).then(|| ctx.dropout_key());
        let key = key.map(|key| DropoutKey { within: self.seam.within, ..key });
        let heads = qkv.dims()[2] / (3 * self.depth);
        // Of a stretch of each sequence, which asks; all are looked at.
        let queries = self.seam.positions(qkv.dims()[1]);
        let dropout = key.as_ref().map(|key| (self.dropout, key));
        self.seam.enter(qkv).causal_attention_of(queries, heads, dropout)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.seam("", &mut self.seam);
    }
}

module! {
    /// Two dense layers, the first four times as wide, with GELU between them: (B, T, W) to the same.
    struct Mlp(config: GptConfig) {
        c_fc: LinearInOut = LinearInOut::new(config.width, 4 * config.width, STD),
        c_proj: LinearInOut = LinearInOut::new(4 * config.width, config.width, config.std_of_branch()),
        drop: Dropout = Dropout::new(config.dropout),
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let y = self.c_fc.gelu_then(&self.c_proj, x, ctx); // by way of (B, T, 4 W)
        self.drop.forward(&y, ctx)
    }
}

module! {
    /// A block of [`Gpt`]: attention and then dense layers, each of what came in, normalised, and added to it. (B, T, W) to the same.
    pub struct Decoder(config: GptConfig) {
        ln_1: LayerNorm = LayerNorm::new(config.width),
        attn: CausalAttention = CausalAttention::new(config),
        ln_2: LayerNorm = LayerNorm::new(config.width),
        mlp: Mlp = Mlp::new(config),
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        let branch = self.attn.forward(&self.ln_1.for_products(x, self.attn.c_attn.seam()), ctx);
        let [x, rows] = self.ln_2.sum_for_products(x, &branch, self.mlp.c_fc.seam());
        x + self.mlp.forward(&rows, ctx)
    }
}

/// The last normalisation and the logits: (B, T, W) to (B, T, V).
struct Logits {
    ln_f: LayerNorm,
    weight: Param,
    head: Head,
    seam: Seam,
}

impl Logits {
    fn new(GptConfig { width, vocabulary, head, .. }: GptConfig) -> Logits {
        let weight = Param::new([vocabulary, width], Init::Normal { std: STD });
        Logits { ln_f: LayerNorm::new(width), weight, head, seam: Seam::default() }
    }
}

impl Module for Logits {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        // The table of words lies where the first block does.
        let x = self.seam.enter(&self.ln_f.for_products(x, &self.seam));
        x.linear(&self.weight.to(x.device()), None)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("ln_f", &mut self.ln_f);
        v.seam("lm_head", &mut self.seam);
        match self.head {
            Head::Tied => v.shared("wte.weight", &mut self.weight),
            Head::Own => v.param("lm_head.weight", &mut self.weight),
        }
    }
}
