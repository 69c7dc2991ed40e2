//! What gets one in wherever a run listens: its secret, and what the connections are encrypted with, if they are.

use crate::secret::Secret;
use crate::tls::Tls;

/// Both, handed around as one, so that what proves itself and what is encrypted can't come apart.
#[derive(Clone)]
pub struct Pass {
    secret: Secret,
    tls: Option<Tls>,
}

impl Pass {
    /// For connections with TLS; both ends must have it, or neither.
    pub fn encrypted(secret: Secret) -> std::io::Result<Pass> {
        Ok(Pass { secret, tls: Some(Tls::new()?) })
    }

    /// What is proven.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// What sessions are begun with.
    pub fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }
}

/// For connections in the clear.
impl From<Secret> for Pass {
    fn from(secret: Secret) -> Pass {
        Pass { secret, tls: None }
    }
}

impl From<&Secret> for Pass {
    fn from(secret: &Secret) -> Pass {
        secret.clone().into()
    }
}

impl From<&Pass> for Pass {
    fn from(pass: &Pass) -> Pass {
        pass.clone()
    }
}
