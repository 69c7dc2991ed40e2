//! Whole models, with PyTorch's names for their parameters.

mod autoencoder;
mod mnist;
mod mnist_hpc;

pub use autoencoder::Autoencoder;
pub use mnist::MnistNet;
pub use mnist_hpc::MnistHpcNet;
