//! Attention against the engine's definition in float64, made of other operations.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, floats, random, room};
use phalanx_cuda::{Apart, Element, Heads, Work};
use phalanx_tensor::{DType, Device, DropoutKey, Gradients, Tensor, Within, backward};
use std::ops::Range;

/// How many roundings of float32, of the largest number that takes part, scores and sums over some hundreds of positions may take.
const STEPS: f64 = 100.0;

/// Which kernels, for which types: their names begin so, and their blocks have so many positions as their own.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    elements: &'static [Element],
    tile: usize,
    /// The numbers of a head that they are made for.
    depths: &'static [usize],
}

const PLAIN: Kind = Kind { name: "attention", elements: &Element::ALL, tile: 32, depths: &[64, 128, 256] };
const HALVES: Kind =
    Kind { name: "halves_attention", elements: &[Element::Bf16, Element::F16], tile: 64, depths: &[64, 128] };

/// Samples, positions, heads, numbers of a head.
type Sizes = [usize; 4];

/// What an attention leaves: the output, (B, Q, H, D), each query's number, and the gradients of queries, keys and values, (B, H, T, D).
struct Left {
    out: Vec<f64>,
    lse: Vec<f64>,
    gradients: [Vec<f64>; 3],
}

/// Which shares are dropped: with which probability, by which key, from which head on of how many.
type Drop<'a> = Option<(f64, &'a DropoutKey)>;

/// Queries, keys and values, and how far apart their rows lie; and what says which keys are hidden.
struct Given<'a> {
    heads: Heads,
    three: [&'a [f64]; 3],
    hiding: Option<Vec<f32>>,
}

/// Of heads that lie (B, H, T, D).
fn by_heads(heads: usize, positions: usize, depth: usize) -> Apart {
    Apart { sample: heads * positions * depth, head: positions * depth, position: depth }
}

/// Of heads that lie (B, T, G, H, D).
fn by_positions(positions: usize, groups: usize, heads: usize, depth: usize) -> Apart {
    let position = groups * heads * depth;
    Apart { sample: positions * position, head: depth, position }
}

impl<'a> Given<'a> {
    /// Of (B, T, 3, H, D), where no query sees a later key and the queries at these positions are asked.
    fn packed([batch, time, heads, depth]: Sizes, asked: &Range<usize>, qkv: &'a [f64]) -> Given<'a> {
        let (width, apart) = (heads * depth, by_positions(time, 3, heads, depth));
        let of_keys = by_heads(heads, time, depth);
        let heads = Heads {
            batch,
            heads,
            depth,
            keys: time,
            from: asked.start,
            asking: asked.len(),
            causal: true,
            dropping: time,
            first: 0,
            threshold: 0,
            given: [apart; 3],
            gradients: [by_heads(heads, asked.len(), depth), of_keys, of_keys],
            hiding: (apart, 0),
            keep: 1.0,
            scale: (1.0 / (depth as f64).sqrt()) as f32,
        };
        let of =
            |group: usize| qkv.get(group * width + if group == 0 { asked.start * 3 * width } else { 0 }..);
        Given { heads, three: [0, 1, 2].map(|group| of(group).unwrap_or_default()), hiding: None }
    }

    /// With what is dropped.
    fn heads(&self, drop: Drop<'_>) -> Heads {
        let p = drop.map_or(0.0, |(p, _)| p);
        Heads {
            first: drop.and_then(|(_, key)| key.within).map_or(0, |within| within.start),
            threshold: (p * f64::from(u32::MAX)) as u32,
            keep: (1.0 / (1.0 - p)) as f32,
            ..self.heads
        }
    }
}

impl Kind {
    /// The kernels' own, of numbers as the type holds them.
    fn run(&self, element: Element, given: &Given<'_>, grad: &[f64], drop: Drop<'_>) -> Left {
        let sizes = given.heads(drop);
        let Heads { batch, heads, depth, keys, asking, .. } = sizes;
        let made_for = self.depths.iter().find(|made_for| **made_for >= depth).unwrap();
        // What most do has kernels of its own.
        let is_plain = self.tile == HALVES.tile
            && *made_for == depth
            && drop.is_none()
            && given.hiding.is_none()
            && keys > 0;
        let plain = if is_plain { "plain_" } else { "" };
        let words = drop.map(|(_, key)| [key.seed, key.step, key.layer]);
        let hidden = given.hiding.as_deref().map(bytemuck::cast_slice::<f32, u8>);
        let masks = || {
            let hiding = hidden.map_or(Arg::Null, Arg::In);
            match (&words, drop) {
                (Some(words), Some((_, key))) => [
                    Arg::In(bytemuck::cast_slice(words)),
                    Arg::In(bytemuck::cast_slice(&key.samples)),
                    hiding,
                ],
                _ => [Arg::Null, Arg::Null, hiding],
            }
        };
        let run = |name: &str, positions: usize, args: Vec<Arg<'_>>| {
            let mut args: Vec<Arg<'_>> =
                args.into_iter().chain(masks()).chain([Arg::Struct(sizes.to_bytes().to_vec())]).collect();
            let work = Work::Pieces((batch * heads * positions.div_ceil(self.tile)) as u64);
            launch(&format!("{}{name}_{plain}{made_for}", self.name), element, work, &mut args);
        };
        let (three, grad) = (given.three.map(|values| encode(element, values)), encode(element, grad));
        let three = || three.each_ref().map(|values| Arg::In(values)).into_iter();
        let mut out = room(element, batch * asking * heads * depth);
        let [mut lse, mut levels] = [(); 2].map(|()| room(Element::F32, batch * heads * asking));
        run("", asking, three().chain([Arg::Out(&mut out), Arg::Out(&mut lse)]).collect());
        let [mut of_q, mut of_k, mut of_v] =
            [asking, keys, keys].map(|positions| room(element, batch * heads * positions * depth));
        let to_queries =
            [Arg::In(&out), Arg::In(&lse), Arg::In(&grad), Arg::Out(&mut levels), Arg::Out(&mut of_q)];
        run("_queries", asking, three().chain(to_queries).collect());
        let to_keys =
            [Arg::In(&lse), Arg::In(&grad), Arg::In(&levels), Arg::Out(&mut of_k), Arg::Out(&mut of_v)];
        run("_keys", keys, three().chain(to_keys).collect());
        let lse = floats(&lse).into_iter().map(f64::from).collect();
        let gradients = [of_q, of_k, of_v].map(|gradient| decode(element, &gradient));
        Left { out: decode(element, &out), lse, gradients }
    }

    /// Holds them against the definition at one size.
    #[track_caller]
    fn check(&self, element: Element, sizes: Sizes, range: f64, drop: Drop<'_>) {
        self.check_of(element, sizes, 0..sizes[1], range, drop);
    }

    /// The same where the queries at these positions are asked.
    #[track_caller]
    fn check_of(&self, element: Element, sizes: Sizes, asked: Range<usize>, range: f64, drop: Drop<'_>) {
        let [batch, time, heads, depth] = sizes;
        let (width, asking) = (heads * depth, asked.len());
        let qkv = random(element, batch * time * 3 * width, -range, range, 1);
        let grad = random(element, batch * asking * width, -1.0, 1.0, 2);
        let got = self.run(element, &Given::packed(sizes, &asked, &qkv), &grad, drop);
        let device = Device::cpu(1);
        let leaf = Tensor::from_slice(&device, &qkv, [batch, time, 3 * width]).requires_grad();
        let y = leaf.causal_attention_in_steps(heads, drop).narrow(1, asked.start, asking);
        let mut grads = Gradients::default();
        backward(&[(&y, Some(&Tensor::from_slice(&device, &grad, [batch, asking, width])))], &mut grads);
        let want =
            grads.get(&leaf).unwrap().reshape([batch, time, 3, heads, depth]).permute(&[2, 0, 3, 1, 4]);
        let of =
            |group: usize, from: usize, n: usize| want.narrow(0, group, 1).narrow(3, from, n).to_vec::<f64>();
        let want = Left {
            out: y.to_vec(),
            lse: log_sums(&qkv, sizes).chunks(time).flat_map(|row| row[asked.clone()].to_vec()).collect(),
            gradients: [of(0, asked.start, asking), of(1, 0, time), of(2, 0, time)],
        };
        let what = format!("{} of {sizes:?} at {asked:?}, dropout {:?}", self.name, drop.map(|(p, _)| p));
        self.compare(&what, element, &got, &want, range);
    }

    /// Holds what came against what is wanted.
    #[track_caller]
    fn compare(&self, what: &str, element: Element, got: &Left, want: &Left, range: f64) {
        let steps = self.steps(element);
        // What is rounded on the way, of numbers as large as the sums' terms together.
        let most = |values: &[f64]| {
            values.iter().filter(|x| x.is_finite()).fold(1.0f64, |most, x| most.max(x.abs()))
        };
        near(&format!("{what}: output"), element, &got.out, &want.out, range, steps);
        for (i, of) in ["queries", "keys", "values"].into_iter().enumerate() {
            let (got, most) = (&got.gradients[i], want.gradients.each_ref().map(|all| most(all)));
            let most = most.into_iter().fold(0.0, f64::max);
            near(&format!("{what}: gradient of {of}"), element, got, &want.gradients[i], most, steps);
        }
        let seen = |values: &[f64]| -> Vec<f64> {
            values.iter().map(|x| if *x == f64::INFINITY { 0.0 } else { *x }).collect()
        };
        let sees_none =
            |values: &[f64]| -> Vec<bool> { values.iter().map(|x| *x == f64::INFINITY).collect() };
        assert_eq!(sees_none(&got.lse), sees_none(&want.lse), "{what}");
        near(
            &format!("{what}: lse"),
            Element::F32,
            &seen(&got.lse),
            &seen(&want.lse),
            most(&want.lse),
            STEPS,
        );
    }

    /// Holds them against the definition where each query sees all keys that a mask, of these dimensions of (B, H, T, S), doesn't hide: at
    /// samples, heads, numbers of a head, queries and keys.
    #[track_caller]
    fn check_all(&self, element: Element, sizes: [usize; 5], masked: Option<[bool; 4]>, drop: Drop<'_>) {
        let [batch, heads, depth, queries, keys] = sizes;
        let (width, device) = (heads * depth, Device::cpu(1));
        // Queries lie by positions, keys by heads, values beside something else.
        let values = [
            random(element, batch * queries * width, -1.0, 1.0, 1),
            random(element, batch * keys * width, -1.0, 1.0, 2),
            random(element, batch * keys * 2 * width, -1.0, 1.0, 3),
        ];
        let grad = random(element, batch * queries * width, -1.0, 1.0, 4);
        let all = [batch, heads, queries, keys];
        let mask = masked.map(|spans| {
            let shape: Vec<usize> =
                all.iter().zip(spans).map(|(n, spans)| if spans { *n } else { 1 }).collect();
            let seen = random(Element::F32, shape.iter().product(), 0.0, 1.0, 5);
            // The first query of all sees nothing.
            let last = shape[2] * shape[3];
            let hides = |i: usize, x: f64| x < 0.4 || (spans[2] && i % last < shape[3] && i < last);
            let seen: Vec<f32> =
                seen.iter().enumerate().map(|(i, &x)| if hides(i, x) { 0.0 } else { x as f32 }).collect();
            (seen, shape)
        });
        let apart = [
            by_positions(queries, 1, heads, depth),
            by_heads(heads, keys, depth),
            by_positions(keys, 2, heads, depth),
        ];
        let packed = Given::packed([batch, keys, heads, depth], &(0..queries), &[]).heads;
        let hiding = mask.as_ref().map_or((apart[0], 0), |(_, shape)| {
            let stride = |dim: usize| if shape[dim] == 1 { 0 } else { shape[dim + 1..].iter().product() };
            (Apart { sample: stride(0), head: stride(1), position: stride(2) }, stride(3))
        });
        let heads_of = Heads { causal: false, dropping: queries, given: apart, hiding, ..packed };
        let three = [&values[0][..], &values[1], values[2].get(width..).unwrap_or_default()];
        let given = Given { heads: heads_of, three, hiding: mask.as_ref().map(|(seen, _)| seen.clone()) };
        let got = self.run(element, &given, &grad, drop);

        let leaf = |values: &[f64], shape: &[usize]| Tensor::from_slice(&device, values, shape);
        let q =
            leaf(&values[0], &[batch, queries, heads, depth]).transpose(1, 2).contiguous().requires_grad();
        let k = leaf(&values[1], &[batch, heads, keys, depth]).requires_grad();
        let v = leaf(&values[2], &[batch, keys, 2, heads, depth]).narrow(2, 1, 1).squeeze(2).transpose(1, 2);
        let v = v.contiguous().requires_grad();
        let mask = mask.map(|(seen, shape)| Tensor::from_slice(&device, &seen, &shape[..]));
        let y = q.attention_in_steps(&k, &v, mask.as_ref(), drop).transpose(1, 2);
        let mut grads = Gradients::default();
        backward(&[(&y, Some(&leaf(&grad, &[batch, queries, heads, depth])))], &mut grads);
        let scores = q.matmul(&k.t()) / (depth as f64).sqrt();
        let seen = mask
            .map_or_else(|| Tensor::ones(&device, all, DType::F32), |mask| mask.ne(0.0).broadcast_to(all));
        let sums = scores.to_vec::<f64>();
        let terms = sums
            .iter()
            .zip(seen.to_vec::<f32>())
            .map(|(score, seen)| if seen == 0.0 { 0.0 } else { score.exp() });
        let terms: Vec<f64> = terms.collect();
        let lse = (0..batch * heads * queries).map(|row| terms[row * keys..][..keys].iter().sum::<f64>());
        let lse = lse.map(|sum| if sum == 0.0 { f64::INFINITY } else { sum.ln() }).collect();
        let gradients = [&q, &k, &v].map(|leaf| grads.get(leaf).unwrap().to_vec());
        let want = Left { out: y.to_vec(), lse, gradients };
        let what =
            format!("{} of {sizes:?}, a mask of {masked:?}, dropout {:?}", self.name, drop.map(|(p, _)| p));
        self.compare(&what, element, &got, &want, 1.0);
    }

    /// As [`STEPS`], where shares and slopes are rounded to the type before they are multiplied.
    fn steps(&self, element: Element) -> f64 {
        let per_rounding = match element {
            Element::F32 => 1.0,
            Element::Bf16 => f64::from(1 << 16),
            Element::F16 => f64::from(1 << 13),
        };
        // The output is rounded where the sum of a query's slopes is told from it.
        STEPS + if element == Element::F32 { 0.0 } else { 4.0 * per_rounding }
    }
}

/// The logarithm of the sum of the exponentials of each query's scores.
fn log_sums(qkv: &[f64], [batch, time, heads, depth]: Sizes) -> Vec<f64> {
    let at = |sample: usize, t: usize, group: usize, head: usize| {
        &qkv[(((sample * time + t) * 3 + group) * heads + head) * depth..][..depth]
    };
    let mut sums = Vec::new();
    for (sample, head) in (0..batch).flat_map(|sample| (0..heads).map(move |head| (sample, head))) {
        sums.extend((0..time).map(|query| {
            let score = |key: usize| {
                let pairs = at(sample, query, 0, head).iter().zip(at(sample, key, 1, head));
                pairs.map(|(q, k)| q * k).sum::<f64>() / (depth as f64).sqrt()
            };
            (0..=query).map(|key| score(key).exp()).sum::<f64>().ln()
        }));
    }
    sums
}

fn key(samples: &[u64]) -> DropoutKey {
    DropoutKey::new(5, 1 << 40, 7, samples.into())
}

#[test]
fn it_is_the_definition_at_every_size() {
    if !there_is_a_compiler() {
        return;
    }
    // Parts of a tile, whole ones and several, in positions; parts of a chunk, whole ones and several, in a head's numbers.
    for sizes in [
        [1, 1, 1, 1],
        [2, 3, 3, 5],
        [1, 32, 1, 32],
        [2, 65, 2, 33],
        [1, 130, 1, 64],
        [1, 40, 2, 100],
        [1, 70, 1, 256],
    ] {
        PLAIN.check(Element::F32, sizes, 1.0, None);
    }
    for element in [Element::Bf16, Element::F16] {
        PLAIN.check(element, [2, 70, 2, 20], 1.0, None);
    }
}

#[test]
fn small_matrices_come_to_the_definition_at_every_size() {
    if !there_is_a_compiler() {
        return;
    }
    // Parts of a tile, whole ones and several, in positions; parts of a fragment, whole ones and several, in a head's numbers, of
    // which there are 8 at least.
    for sizes in [
        [1, 1, 1, 8],
        [2, 17, 3, 24],
        [1, 64, 1, 64],
        [2, 70, 2, 40],
        [1, 130, 1, 16],
        [1, 97, 2, 104],
        [1, 64, 1, 128],
        [2, 150, 2, 64],
        [1, 70, 1, 128],
    ] {
        for &element in HALVES.elements {
            HALVES.check(element, sizes, 1.0, None);
        }
    }
}

/// Masks of (B, H, T, S): of keys alone, as of samples that are filled up, of queries, of all.
const MASKS: [Option<[bool; 4]>; 4] = [
    None,
    Some([true, false, false, true]),
    Some([false, false, true, false]),
    Some([true, true, true, true]),
];

#[test]
fn all_keys_that_are_not_hidden_are_seen() {
    if !there_is_a_compiler() {
        return;
    }
    // Samples, heads, numbers of a head, queries, keys: parts of a tile, whole ones and several of either side.
    let few = [[1, 1, 8, 1, 3], [2, 2, 24, 17, 70], [1, 2, 64, 64, 64]].map(|sizes| (sizes, &MASKS[..]));
    let many = [[1, 1, 64, 130, 30], [1, 1, 128, 70, 97]].map(|sizes| (sizes, &MASKS[..2]));
    for (sizes, masks) in few.into_iter().chain(many) {
        let key = key(&[8, 1 << 33][..sizes[0]]);
        for (i, &masked) in masks.iter().enumerate() {
            let drop = if i % 2 == 0 { None } else { Some((0.3, &key)) };
            PLAIN.check_all(Element::F32, sizes, masked, drop);
            for &element in HALVES.elements {
                HALVES.check_all(element, sizes, masked, drop);
            }
        }
    }
    for kind in [PLAIN, HALVES] {
        // No keys to see, and keys that nobody looks at.
        for sizes in [[1, 1, 64, 3, 0], [1, 1, 64, 0, 3]] {
            kind.check_all(Element::Bf16, sizes, None, None);
        }
    }
    let key = key(&[3]);
    for drop in [None, Some((0.3, &key))] {
        PLAIN.check_all(Element::F32, [1, 2, 5, 40, 33], MASKS[3], drop);
        HALVES.check_all(Element::Bf16, [1, 2, 64, 40, 33], None, drop);
    }
}

#[test]
fn some_of_the_queries_are_asked() {
    if !there_is_a_compiler() {
        return;
    }
    let key = key(&[8, 1 << 33]);
    // Before, within, across and behind tiles of either size, and none at all.
    for asked in [0..30, 7..9, 50..100, 96..130, 129..130, 60..60] {
        for drop in [None, Some((0.3, &key))] {
            PLAIN.check_of(Element::F32, [2, 130, 2, 16], asked.clone(), 1.0, drop);
            for &element in HALVES.elements {
                HALVES.check_of(element, [2, 130, 2, 16], asked.clone(), 1.0, drop);
            }
        }
        HALVES.check_of(Element::Bf16, [1, 130, 1, 64], asked.clone(), 1.0, None);
        HALVES.check_of(Element::F16, [1, 130, 1, 128], asked, 1.0, None);
    }
}

#[test]
fn what_it_drops_is_what_the_engine_drops() {
    if !there_is_a_compiler() {
        return;
    }
    let key = key(&[8, 1 << 33]);
    for sizes in [[2, 1, 1, 4], [2, 67, 3, 9]] {
        PLAIN.check(Element::F32, sizes, 1.0, Some((0.3, &key)));
    }
    for &element in HALVES.elements {
        HALVES.check(element, [2, 67, 3, 16], 1.0, Some((0.3, &key)));
    }
    HALVES.check(Element::Bf16, [1, 40, 1, 72], 1.0, Some((0.6, &self::key(&[3]))));
    // Positions of which four keys have a block of random numbers to themselves, which lanes make for each other.
    HALVES.check(Element::F16, [2, 132, 1, 24], 1.0, Some((0.4, &key)));
    // Some of the heads drop what they drop among all: the definition knows how.
    let part = DropoutKey { within: Some(Within { dim: 1, start: 2, of: 5 }), ..key };
    PLAIN.check(Element::F32, [2, 35, 2, 8], 1.0, Some((0.5, &part)));
}

#[test]
fn what_it_keeps_of_few_may_be_more_than_16_bits_hold() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    // Few shares are kept, which count as many times as much: what is kept of the largest is more than a float16 can be where a query sees
    // itself alone, and less where queries see many keys. An output may be neither too large nor nothing.
    for ((p, sizes), kept) in
        [((0.999_984_85, [1, 1, 64, 8]), 65_505.0..70_000.0), ((0.99999, [1, 132, 2, 8]), 500.0..5000.0)]
    {
        let [batch, time, heads, depth] = sizes;
        let shape = [batch, time, 3 * heads * depth];
        let is_kept = |key: &DropoutKey| {
            // The values are 1, so an output is what is kept of its query's shares.
            let ones = Tensor::from_slice(&device, &vec![1.0f64; shape.iter().product()], shape);
            let all = ones.causal_attention_in_steps(heads, Some((p, key))).to_vec::<f64>();
            kept.contains(&all.into_iter().fold(0.0, f64::max))
        };
        let key = (0..).map(|sample| key(&[sample])).find(is_kept).unwrap();
        for &element in HALVES.elements {
            HALVES.check(element, sizes, 0.5, Some((p, &key)));
        }
        PLAIN.check(Element::F16, sizes, 0.5, Some((p, &key)));
    }
}

#[test]
fn scores_of_any_size_are_shared_out() {
    if !there_is_a_compiler() {
        return;
    }
    // Scores of tens of thousands: their exponentials alone would be infinite.
    let (sizes, width) = ([1, 80, 1, 32], 32);
    for kind in [PLAIN, HALVES] {
        for &element in kind.elements {
            let qkv = random(element, 80 * 3 * width, -300.0, 300.0, 1);
            let grad = random(element, 80 * width, -1.0, 1.0, 2);
            let Left { out, lse, gradients } =
                kind.run(element, &Given::packed(sizes, &(0..sizes[1]), &qkv), &grad, None);
            assert!(
                out.iter().chain(&lse).chain(gradients.iter().flatten()).all(|x| x.is_finite()),
                "{}, {element:?}",
                kind.name
            );
            // The first position sees itself alone.
            assert_eq!(out[..width], qkv[2 * width..3 * width], "{}, {element:?}", kind.name);
        }
    }
}

/// What a query sees that is no number makes its output none, and so the gradients of what it sees; what isn't seen stays out of it, and so
/// do queries that aren't there.
#[test]
fn what_is_no_number_goes_to_whoever_sees_it() {
    if !there_is_a_compiler() {
        return;
    }
    const TIME: usize = 70;
    for (kind, depth, bad, at) in [PLAIN, HALVES].into_iter().flat_map(|kind| {
        let bad = [(f64::NAN, 40), (f64::INFINITY, 40), (f64::INFINITY, 62), (f64::NEG_INFINITY, 62)];
        bad.into_iter().flat_map(move |(bad, at)| [64, 24, 128].map(|depth| (kind, depth, bad, at)))
    }) {
        let (sizes, asked) = ([1, TIME, 1, depth], 3..60);
        let mut qkv = random(Element::Bf16, TIME * 3 * depth, -1.0, 1.0, 1);
        let grad = random(Element::Bf16, asked.len() * depth, -1.0, 1.0, 2);
        // Of a key.
        qkv[(at * 3 + 1) * depth + 5] = bad;
        let got = kind.run(Element::Bf16, &Given::packed(sizes, &asked, &qkv), &grad, None);
        let what = format!("{}, {depth}, {bad} at {at}", kind.name);
        for (i, query) in asked.clone().enumerate() {
            let is_none = got.out[i * depth..][..depth].iter().any(|x| x.is_nan());
            assert!(query >= at || !is_none, "{what}: query {query}");
            // An infinite key is the largest or the smallest of scores.
            assert!(query < at || is_none || !bad.is_nan(), "{what}: query {query}");
        }
        for key in asked.end..TIME {
            for own in &got.gradients[1..] {
                let own = &own[key * depth..][..depth];
                assert!(own.iter().all(|x| *x == 0.0), "{what}: key {key}, which nobody sees: {own:?}");
            }
        }
    }
}

#[test]
fn nothing_is_launched_for_nothing() {
    if !there_is_a_compiler() {
        return;
    }
    for (kind, sizes) in
        [PLAIN, HALVES].into_iter().flat_map(|kind| [[0, 4, 2, 8], [2, 0, 2, 8]].map(|s| (kind, s)))
    {
        let given = Given::packed(sizes, &(0..sizes[1]), &[]);
        let Left { out, lse, gradients } = kind.run(kind.elements[0], &given, &[], None);
        assert!(out.is_empty() && lse.is_empty() && gradients.iter().all(Vec::is_empty));
    }
}
