//! Connections that nobody in between can read or change: TLS 1.3.
//!
//! Nobody's name is certified here. Each endpoint makes a key for itself and shows only that, as a raw public key (RFC 7250);
//! the other end takes any. Who that is, the run's secret proves, inside the session and bound to it ([`Socket::binding`]): one
//! who is in between has two sessions, whose bindings differ, and no proof that goes for both.
//!
//! A session has no end of its own: a closed connection ends it. Whoever leaves says so in a parting word, and a message that
//! was cut off isn't whole, so a forged end is just a lost connection.

use crate::deadline::Deadline;
use crate::handshake::{HandshakeError, Socket};
use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig,
};
use rustls::{Error as TlsError, PeerMisbehaved, ServerConnection, SignatureScheme};
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// What the binding of a session is derived by (RFC 5705).
const BINDING: &[u8] = b"EXPORTER-phalanx";
/// Encrypted bytes that one read takes from the kernel.
const READ: usize = 64 << 10;
/// Slices, of a frame's head or data, that are encrypted before the kernel is offered what became of them.
const SLICES: usize = 8;

/// What an endpoint begins sessions with.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// With a fresh key.
    pub fn new() -> Result<Tls> {
        let failed = |error: &dyn std::fmt::Display| Error::other(format!("TLS has no key: {error}"));
        let provider = Arc::new(provider::default_provider());
        let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|error| failed(&error))?;
        let key = PrivatePkcs8KeyDer::from(made.as_ref().to_vec());
        let key = provider::sign::any_eddsa_type(&key).map_err(|error| failed(&error))?;
        let public = key.public_key().ok_or_else(|| failed(&"its public half is missing"))?;
        let shown = CertificateDer::from(public.as_ref().to_vec());
        let shown = AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(vec![shown], key)));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| failed(&error))?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(shown));
        // Nothing is resumed.
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| failed(&error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyKey(provider)))
            .with_no_client_auth();
        client.resumption = rustls::client::Resumption::disabled();
        client.enable_sni = false;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server) })
    }

    /// A session over a blocking connection that this end made.
    pub fn dial(&self, stream: TcpStream, deadline: &Deadline) -> Result<Session> {
        // A name is needed, and nobody's.
        let name = ServerName::from(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let connection = ClientConnection::new(Arc::clone(&self.client), name).map_err(broken)?;
        Session::begin(connection.into(), stream, deadline)
    }

    /// A session over a blocking connection that came.
    pub fn accept(&self, stream: TcpStream, deadline: &Deadline) -> Result<Session> {
        let connection = ServerConnection::new(Arc::clone(&self.server)).map_err(broken)?;
        Session::begin(connection.into(), stream, deadline)
    }
}

fn broken(error: TlsError) -> Error {
    let told = |text| Error::new(ErrorKind::InvalidData, text);
    match error {
        // See `agree` in channel.rs.
        TlsError::AlertReceived(AlertDescription::ProtocolVersion) => {
            Error::new(ErrorKind::InvalidData, HandshakeError::HasNoTls)
        }
        TlsError::InvalidMessage(_) => told(format!("the other end doesn't speak TLS ({error})")),
        _ => told(format!("TLS: {error}")),
    }
}

/// Takes any key, as long as the other end has its private half.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// A connection with TLS, blocking or not as its stream is.
pub struct Session {
    connection: Connection,
    stream: Arc<TcpStream>,
    /// What came and isn't decrypted yet lies there.
    raw: Box<[u8]>,
    from: usize,
    to: usize,
    /// Decrypted bytes that nobody has taken yet.
    plain: usize,
}

impl Session {
    /// Meets the other end, within the deadline however slowly the bytes come.
    fn begin(mut connection: Connection, stream: TcpStream, deadline: &Deadline) -> Result<Session> {
        // What isn't sent yet is bounded by `SLICES`.
        connection.set_buffer_limit(None);
        let raw = vec![0; READ].into();
        let mut session = Session { connection, stream: Arc::new(stream), raw, from: 0, to: 0, plain: 0 };
        while session.connection.is_handshaking() || session.connection.wants_write() {
            session.stream.limit(deadline.remaining().max(Duration::from_millis(1)))?;
            let came =
                if session.connection.wants_write() { session.flush().map(|()| 1) } else { session.pull() };
            match came {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(error);
                }
                _ if deadline.expired() => {
                    let text = format!("no TLS within {:.1?}", deadline.waited());
                    return Err(Error::new(ErrorKind::TimedOut, text));
                }
                _ => {}
            }
        }
        Ok(session)
    }

    /// What it goes over.
    pub fn stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    /// Whether something came that the kernel doesn't have any more.
    pub fn holds(&self) -> bool {
        self.plain > 0 || self.from < self.to
    }

    /// Offers the kernel what is encrypted; whether it took all.
    fn push(&mut self) -> Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut &*self.stream) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Decrypts what came, with one read at most; says how many bytes came, whatever is in them.
    fn pull(&mut self) -> Result<usize> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
            self.to = (&*self.stream).read(&mut self.raw)?;
        }
        let came = self.to - self.from;
        while self.from < self.to && self.plain == 0 {
            self.from += self.connection.read_tls(&mut &self.raw[self.from..self.to])?;
            let processed = self.connection.process_new_packets();
            if processed.is_err() {
                // The other end is told what is wrong, if that goes.
                let _ = self.push();
            }
            self.plain = processed.map_err(broken)?.plaintext_bytes_to_read();
        }
        Ok(came)
    }

    /// Takes what is decrypted.
    fn take(&mut self, into: &mut [u8]) -> Result<usize> {
        let n = self.plain.min(into.len());
        self.connection.reader().read_exact(&mut into[..n])?;
        self.plain -= n;
        Ok(n)
    }
}

impl Read for Session {
    /// Interrupted where only a part of a record came, so that whoever limits the time of many reads gets to look at it.
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        if self.plain == 0 && self.pull()? == 0 {
            return Ok(0);
        }
        match self.take(into)? {
            0 if !into.is_empty() => Err(ErrorKind::Interrupted.into()),
            n => Ok(n),
        }
    }

    /// As much as is there, up to the end of the slices.
    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> Result<usize> {
        let mut got = 0;
        for slice in slices {
            let mut filled = 0;
            while filled < slice.len() {
                match self.read(&mut slice[filled..]) {
                    Ok(0) => return Ok(got),
                    Ok(n) => (filled, got) = (filled + n, got + n),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    // Whatever it is, it is met again.
                    Err(_) if got > 0 => return Ok(got),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(got)
    }
}

impl Write for Session {
    fn write(&mut self, from: &[u8]) -> Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    /// What is taken is encrypted, and mostly the kernel's; [`Write::flush`] says whether all of it is.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> Result<usize> {
        let mut taken = 0;
        for slices in slices.chunks(SLICES) {
            if !self.push()? {
                break;
            }
            taken += self.connection.writer().write_vectored(slices)?;
        }
        if taken == 0 && !slices.iter().all(|slice| slice.is_empty()) {
            return Err(ErrorKind::WouldBlock.into());
        }
        // What goes wrong is met again.
        let _ = self.push();
        Ok(taken)
    }

    fn flush(&mut self) -> Result<()> {
        if self.push()? { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) }
    }
}

impl Socket for Session {
    fn limit(&self, limit: Duration) -> Result<()> {
        self.stream.limit(limit)
    }

    fn binding(&self) -> Result<Vec<u8>> {
        self.connection.export_keying_material(vec![0; 32], BINDING, None).map_err(broken)
    }
}

#[cfg(test)]
mod tests;
