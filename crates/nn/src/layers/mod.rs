//! The layers, a file each.

pub(crate) mod activation;
pub(crate) mod conv;
pub(crate) mod dropout;
pub(crate) mod embedding;
pub(crate) mod linear;
pub(crate) mod norm;
pub(crate) mod pair;
pub(crate) mod pooling;
pub(crate) mod recurrent;
pub(crate) mod sequential;
pub(crate) mod transformer;
