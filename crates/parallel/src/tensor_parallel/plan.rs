//! Which layers of a model are cut, and how.

use super::crossing::Move;
use crate::ranks::Ranks;
use phalanx_nn::models::{MnistHpcNet, MnistNet, ResNetDepth};
use phalanx_nn::{Cut, Module, Role, Seam, Stretch, Visitor};
use phalanx_tensor::Within;
use std::collections::HashMap;
use thiserror::Error;

/// How a layer is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// By its outputs, along which its weight lies in dimension `dim`: each rank has some, of each of `groups` stretches of them as many. What
    /// comes in is whole.
    Outputs {
        /// The dimension of the weight.
        dim: usize,
        /// 3 where queries, keys and values come side by side.
        groups: usize,
    },
    /// By its inputs, along which its weight lies in dimension `dim`: each rank is given some, and what ranks come to is added up, then
    /// the bias.
    Inputs {
        /// The dimension of the weight.
        dim: usize,
    },
    /// An attention, which on each rank has some of so many heads.
    Heads {
        /// How many all ranks have.
        of: usize,
    },
    /// A dropout between a layer that is cut by its outputs and one by its inputs: of what it is given, all ranks have so many numbers
    /// along dimension `dim`.
    Dropout {
        /// The dimension of what it is given.
        dim: usize,
        /// How many numbers all ranks have.
        of: usize,
    },
    /// A batch norm behind a convolution that is cut by its outputs: each rank has some channels, with their statistics.
    Channels,
    /// A table of vectors, by its rows.
    Rows,
    /// The logits of the words of a table that is cut by its rows, or of a weight of their own, which then is cut likewise.
    Scores,
    /// A table with a row a position, which all ranks have.
    Positions,
}

/// What ranks have between the layers that are cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Between {
    /// The same, which each computes for itself.
    #[default]
    Whole,
    /// A stretch of each sequence each: (B, T / n, ...) of (B, T, ...).
    Sequence,
}

/// Which layers of a model are cut, by their names, in which a `*` stands for any characters. Dense layers, convolutions of one group,
/// batch norms between two of these, tables of vectors and the attention of a decoder can be. Between a layer that is cut by its outputs and the one by its inputs that belongs to it, what is
/// computed goes number by number; a dropout there is told so, since its mask is the part of the whole's.
///
/// ```
/// use phalanx_parallel::{Between, Plan, Style};
///
/// let mlp = Plan::new(Between::Whole)
///     .with("*.up", Style::Outputs { dim: 0, groups: 1 })
///     .with("*.down", Style::Inputs { dim: 1 });
/// assert_eq!(mlp.style_of("h.3.down"), Some(Style::Inputs { dim: 1 }));
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    rows: Vec<(String, Style)>,
    between: Between,
}

/// A plan that isn't the model's.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// A name that no layer has.
    #[error("the plan cuts {pattern}, and the model has no such layer\nhint: its layers are {}", .layers.join(", "))]
    NoLayer {
        /// What was looked for.
        pattern: String,
        /// What there is.
        layers: Vec<String>,
    },
    /// Nothing in it knows of positions.
    #[error(
        "the plan has no sequences that could be cut\nhint: name an attention (Style::Heads) and a table of positions (Style::Positions)"
    )]
    NoSequences,
    /// A dimension that doesn't fall into equal parts.
    #[error("{name}: {len} along dimension {dim}, which {parts} ranks can't share evenly")]
    Uneven {
        /// The parameter.
        name: String,
        /// How long it is.
        len: usize,
        /// Along which dimension.
        dim: usize,
        /// Into how many parts it was to fall.
        parts: usize,
    },
    /// A convolution of several groups, whose channels aren't cut.
    #[error(
        "{layer}: a convolution of {groups} groups of channels, which ranks can't share\nhint: leave it out of the plan, with the layer that is cut together with it"
    )]
    Grouped {
        /// The layer.
        layer: String,
        /// How many groups it has.
        groups: usize,
    },
}

impl Plan {
    /// Nothing is cut yet.
    pub fn new(between: Between) -> Plan {
        Plan { rows: Vec::new(), between }
    }

    /// The same, with the layers of this name cut so.
    pub fn with(mut self, pattern: &str, style: Style) -> Plan {
        self.rows.push((pattern.to_owned(), style));
        self
    }

    /// The same, with two layers cut together whose weights are (out, in): the first by its outputs, the second by its inputs.
    fn with_pair(self, first: &str, second: &str) -> Plan {
        self.with(first, Style::Outputs { dim: 0, groups: 1 }).with(second, Style::Inputs { dim: 1 })
    }

    /// The plan of [`phalanx_nn::models::Gpt`] with so many heads.
    pub fn of_gpt(heads: usize, between: Between) -> Plan {
        Plan::new(between)
            .with("wte", Style::Rows)
            .with("wpe", Style::Positions)
            .with("h.*.attn.c_attn", Style::Outputs { dim: 1, groups: 3 })
            .with("h.*.attn.heads", Style::Heads { of: heads })
            .with("h.*.attn.c_proj", Style::Inputs { dim: 0 })
            .with("h.*.mlp.c_fc", Style::Outputs { dim: 1, groups: 1 })
            .with("h.*.mlp.c_proj", Style::Inputs { dim: 0 })
            .with("lm_head", Style::Scores)
    }

    /// The plan of [`phalanx_nn::models::MnistNet`], whose dense layers are cut.
    pub fn of_mnist() -> Plan {
        let dropout = Style::Dropout { dim: 1, of: MnistNet::DENSE };
        Plan::new(Between::Whole).with_pair("fc1", "fc2").with("drop", dropout)
    }

    /// The plan of [`phalanx_nn::models::MnistHpcNet`], whose dense layers are cut.
    pub fn of_mnist_hpc() -> Plan {
        let dropout = Style::Dropout { dim: 1, of: MnistHpcNet::DENSE };
        Plan::new(Between::Whole).with_pair("fc1", "fc2").with("drop2", dropout)
    }

    /// The plan of [`phalanx_nn::models::ResNet`]: in each block the two largest of the convolutions that follow each other, with the
    /// batch norm between them. The first layer, shortcuts and the last layer stay whole.
    pub fn of_resnet(depth: ResNetDepth) -> Plan {
        let [first, norm, second] = match depth.expansion() {
            1 => ["conv1", "bn1", "conv2"],
            _ => ["conv2", "bn2", "conv3"],
        };
        Plan::new(Between::Whole)
            .with_pair(&format!("layer*.{first}"), &format!("layer*.{second}"))
            .with(&format!("layer*.{norm}"), Style::Channels)
    }

    /// The plan of [`phalanx_nn::models::ResNet9`]: of its convolutions, which follow each other in pairs, each first and second.
    pub fn of_resnet9() -> Plan {
        let pairs = [
            ["prep.conv", "prep.norm", "layer1.conv"],
            ["residual*.conv1", "residual*.bn1", "residual*.conv2"],
            ["layer2.conv", "layer2.norm", "layer3.conv"],
        ];
        pairs.into_iter().fold(Plan::new(Between::Whole), |plan, [first, norm, second]| {
            plan.with_pair(first, second).with(norm, Style::Channels)
        })
    }

    /// The plan of [`phalanx_nn::models::Autoencoder`]: of its dense layers, each first and second.
    pub fn of_autoencoder() -> Plan {
        let pairs = [["encoder.1", "encoder.3"], ["encoder.5", "decoder.0"], ["decoder.2", "decoder.4"]];
        pairs
            .into_iter()
            .fold(Plan::new(Between::Whole), |plan, [first, second]| plan.with_pair(first, second))
    }

    /// What ranks have between the layers that are cut.
    pub fn between(&self) -> Between {
        self.between
    }

    /// Whether each rank comes to the scores of some classes alone.
    pub(crate) fn cuts_scores(&self) -> bool {
        self.rows.iter().any(|(_, style)| *style == Style::Scores)
    }

    /// How the layer of this name is cut, if it is.
    pub fn style_of(&self, layer: &str) -> Option<Style> {
        self.rows.iter().find(|(pattern, _)| matches(pattern, layer)).map(|(_, style)| *style)
    }

    /// Which part of a parameter or buffer rank `rank` of `of` holds, if it isn't all of it.
    pub(crate) fn cut(&self, name: &str, rank: usize, of: usize) -> Option<Cut> {
        let (layer, leaf) = name.rsplit_once('.')?;
        let part = |dim, groups| Some(Cut { dim, groups, part: rank, of });
        match (self.style_of(layer)?, leaf) {
            (Style::Outputs { dim, groups }, "weight") => part(dim, groups),
            (Style::Outputs { groups, .. }, "bias") => part(0, groups),
            (Style::Inputs { dim }, "weight") => part(dim, 1),
            (Style::Rows | Style::Scores, "weight") | (Style::Channels, _) => part(0, 1),
            _ => None,
        }
    }

    /// Cuts a model that has no parameters yet for its rank among `ranks`.
    pub(crate) fn apply(&self, model: &mut dyn Module, ranks: &Ranks) -> Result<(), PlanError> {
        let (rank, of) = (ranks.rank(), ranks.count());
        let (mut uneven, mut grouped) = (None, None);
        let (mut rows, mut layers) = (HashMap::new(), Vec::new());
        model.visit(&mut Visitor::new(&mut |name, role, param| {
            let Some(cut) = self.cut(name, rank, of).filter(|_| role != Role::Shared) else { return };
            let (len, parts) = (param.declared_shape().dims()[cut.dim], cut.groups * of);
            if !len.is_multiple_of(parts) {
                uneven.get_or_insert(PlanError::Uneven { name: name.to_owned(), len, dim: cut.dim, parts });
                return;
            }
            if let Some((layer, _)) = name.rsplit_once('.') {
                rows.insert(layer.to_owned(), len);
                if self.style_of(layer) == Some(Style::Channels) {
                    layers.push(layer.to_owned());
                }
            }
            param.hold_part(cut);
        }));
        model.visit(&mut Visitor::of_seams(&mut |name, seam| {
            layers.push(name.to_owned());
            if let Some(style) = self.style_of(name) {
                if seam.groups > 1 {
                    grouped.get_or_insert(PlanError::Grouped { layer: name.to_owned(), groups: seam.groups });
                }
                let drawn = match style {
                    Style::Heads { of: heads } => Some((heads, 1)),
                    Style::Dropout { dim, of: numbers } => Some((numbers, dim)),
                    _ => None,
                };
                if let Some((len, dim)) = drawn.filter(|(len, _)| !len.is_multiple_of(of)) {
                    uneven.get_or_insert(PlanError::Uneven { name: name.to_owned(), len, dim, parts: of });
                }
                *seam = self.seam(style, rows.get(name).copied().unwrap_or(0), ranks);
            }
        }));
        let found = |(pattern, _): &&(String, Style)| !layers.iter().any(|layer| matches(pattern, layer));
        let missing = self.rows.iter().find(found);
        let missing = missing.map(|(pattern, _)| PlanError::NoLayer { pattern: pattern.clone(), layers });
        missing.or(grouped).or(uneven).map_or(Ok(()), Err)
    }

    /// Gives a model that has no parameters yet a stretch of each sequence, that of its rank among `ranks`: an attention's queries there
    /// look at the keys and values of all.
    pub(crate) fn stretch(&self, model: &mut dyn Module, ranks: &Ranks) -> Result<(), PlanError> {
        let stretch = Some(Stretch { number: ranks.rank(), of: ranks.count() });
        let mut attends = false;
        model.visit(&mut Visitor::of_seams(&mut |name, seam| match self.style_of(name) {
            Some(Style::Heads { .. }) => {
                attends = true;
                seam.stretch = stretch;
                seam.enter = Some(ranks.crossing(Move::GatherKeys, Move::ScatterKeys));
            }
            Some(Style::Positions) => seam.stretch = stretch,
            _ => {}
        }));
        if attends { Ok(()) } else { Err(PlanError::NoSequences) }
    }

    /// What is done around a layer, whose weight has so many rows.
    fn seam(&self, style: Style, rows: usize, ranks: &Ranks) -> Seam {
        let sequence = self.between == Between::Sequence;
        // Each of these has the other as its way back.
        let spread = if sequence {
            ranks.crossing(Move::Gather, Move::Scatter)
        } else {
            ranks.crossing(Move::Keep, Move::Sum)
        };
        let sum = if sequence {
            ranks.crossing(Move::Scatter, Move::Gather)
        } else {
            ranks.crossing(Move::Sum, Move::Keep)
        };
        let within = |dim, of| Some(Within { dim, start: ranks.rank() * of / ranks.count(), of });
        let nothing = Seam::default();
        match style {
            Style::Outputs { .. } | Style::Scores => Seam { enter: Some(spread), ..nothing },
            Style::Inputs { .. } => Seam { leave: Some(sum), ..nothing },
            Style::Heads { of } => Seam { within: within(1, of), ..nothing },
            Style::Dropout { dim, of } => Seam { within: within(dim, of), ..nothing },
            Style::Rows => Seam { leave: Some(sum), within: within(0, rows), ..nothing },
            Style::Positions if sequence => {
                Seam { leave: Some(ranks.crossing(Move::OwnRows, Move::PadRows)), ..nothing }
            }
            Style::Positions | Style::Channels => nothing,
        }
    }
}

/// Whether a name is what a pattern says, in which one `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((first, last)) => name.strip_prefix(first).is_some_and(|rest| rest.ends_with(last)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_comm::Group;
    use phalanx_nn::models::{Gpt, GptConfig, Head, MnistNet};
    use phalanx_nn::{Conv2d, Linear, Parameters, Sequential};
    use phalanx_tensor::Device;

    const GPT: GptConfig = GptConfig {
        layers: 2,
        width: 12,
        heads: 4,
        context: 8,
        vocabulary: 20,
        dropout: 0.0,
        head: Head::Own,
    };

    #[test]
    fn each_rank_has_its_part_of_the_first_values_and_all_parts_are_the_whole() {
        let whole = Parameters::build(&mut Gpt::new(GPT), &Device::cpu(1), 5);
        let plan = Plan::of_gpt(GPT.heads, Between::Whole);
        let mut back = vec![f32::NAN; whole.layout().len()];
        for group in Group::threads(2) {
            let ranks = Ranks::of(group);
            let mut part = Gpt::new(GPT);
            plan.apply(&mut part, &ranks).unwrap();
            let part = Parameters::build(&mut part, &Device::cpu(1), 5);
            assert_eq!(part.names(), whole.names());
            // All but norms, positions and the biases of layers that are cut by their inputs.
            let uncut = |name: &&String| plan.cut(name, 0, 2).is_none();
            assert_eq!(whole.names().iter().filter(uncut).count(), 1 + 2 * (4 + 2) + 2);
            for (i, name) in whole.names().iter().enumerate() {
                let (shape, range) = (whole.layout().shape(i), whole.layout().range(i));
                let values = part.value(i).to_vec::<f32>();
                match plan.cut(name, ranks.rank(), 2) {
                    Some(cut) => cut.put(shape, &values, &mut back[range]),
                    None => back[range].copy_from_slice(&values),
                }
            }
        }
        for i in 0..whole.names().len() {
            let range = whole.layout().range(i);
            assert!(back[range] == whole.value(i).to_vec::<f32>(), "{}", whole.names()[i]);
        }
    }

    #[test]
    fn a_plan_of_another_model_is_refused() {
        let ranks = Ranks::of(Group::threads(2).remove(0));
        let refused =
            |plan: &Plan, mut model: Box<dyn Module>| plan.apply(&mut model, &ranks).unwrap_err().to_string();
        let plan = Plan::of_gpt(4, Between::Whole);
        let said = refused(&plan, Box::new(Linear::new(4, 4)));
        assert!(said.starts_with("the plan cuts wte, and the model has no such layer\nhint: "), "{said}");
        let odd = GptConfig { vocabulary: 21, ..GPT };
        let three = Plan::new(Between::Whole).with("drop", Style::Dropout { dim: 1, of: 51 });
        assert_eq!(
            refused(&three, Box::new(MnistNet::new(0.5))),
            "drop: 51 along dimension 1, which 2 ranks can't share evenly"
        );
        assert_eq!(
            refused(&plan, Box::new(Gpt::new(odd))),
            "wte.weight: 21 along dimension 0, which 2 ranks can't share evenly"
        );
        let convs = [Conv2d::new(4, 4, 3), Conv2d::new(4, 8, 3).groups(2)];
        let net = convs.into_iter().fold(Sequential::new(), |net, conv| net.then(conv));
        let said = refused(&Plan::new(Between::Whole).with_pair("0", "1"), Box::new(net));
        let want = "1: a convolution of 2 groups of channels, which ranks can't share\nhint: leave it out";
        assert!(said.starts_with(want), "{said}");
    }
}
