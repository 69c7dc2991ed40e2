//! A table of vectors.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use crate::seam::Seam;
use phalanx_tensor::Tensor;

/// Row `id` of a table for each id. Parameter `weight` (rows, width), starting normally distributed with std 1.
///
/// ```
/// use phalanx_nn::{Ctx, Embedding, Module, Parameters};
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = Embedding::new(100, 8);
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let ids = Tensor::from_slice(&device, &[3i64, 99, 3], [1, 3]);
/// assert_eq!(layer.forward(&ids, &mut Ctx::eval()).dims(), [1, 3, 8]);
/// ```
pub struct Embedding {
    weight: Param,
    padding: Option<i64>,
    seam: Seam,
}

impl Embedding {
    /// A table of `rows` vectors of `width` numbers.
    pub fn new(rows: usize, width: usize) -> Embedding {
        let weight = Param::new([rows, width], Init::Normal { std: 1.0 });
        Embedding { weight, padding: None, seam: Seam::default() }
    }

    /// The first rows of the table, or those of the stretch of so many that is here ([`Seam::stretch`]). Panics if there are fewer.
    #[track_caller]
    pub fn first(&self, rows: usize) -> Tensor {
        let first = self.seam.positions(rows).start;
        let all = first == 0 && rows == self.weight.dims()[0];
        self.seam.leave(if all { self.weight.clone() } else { self.weight.narrow(0, first, rows) })
    }

    /// The same table, of which the row of this id, of what fills sequences up, learns nothing. It begins as the others do, where PyTorch's
    /// `padding_idx` begins with zeros.
    pub fn padding_idx(self, id: usize) -> Embedding {
        Embedding { padding: Some(id as i64), ..self }
    }

    /// The same table with other first values.
    pub fn init(mut self, init: Init) -> Embedding {
        self.weight.init = init;
        self
    }
}

impl Module for Embedding {
    /// Ids, i64 of (...), to (..., width).
    fn forward(&self, ids: &Tensor, _: &mut Ctx) -> Tensor {
        let rows = match self.seam.within {
            None => self.weight.embedding(ids),
            Some(within) => self.weight.embedding_within(within, ids),
        };
        self.seam.leave(match self.padding {
            Some(id) => {
                let learns = ids.ne(id as f64).unsqueeze(ids.dims().len());
                learns.where_cond(&rows, &rows.detach())
            }
            None => rows,
        })
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.weight);
        v.seam("", &mut self.seam);
    }
}
