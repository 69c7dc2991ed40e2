//! Where a process listens, whoever comes proves itself on a thread of its own before it is served, and holds up nobody.

use crate::handshake::HandshakeError;
use crate::strangers::Strangers;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// How long it rests where those who wait outside can't be taken in: to look again at once would take a core.
const BARRED: Duration = Duration::from_millis(50);

/// What is done with those who come.
pub trait Reception: Send + Sync + 'static {
    /// Who has proven itself.
    type Guest;

    /// What the threads are called that serve.
    const THREAD: &'static str;

    /// Room for those who haven't proven themselves.
    fn strangers(&self) -> &Strangers<TcpStream>;

    /// Whether nobody is served any more; a last connection is made to find that out.
    fn is_closed(&self) -> bool;

    /// Has one prove itself.
    fn prove(&self, stream: TcpStream) -> Result<Self::Guest, HandshakeError>;

    /// Serves one to the end of its connection; an error is why it was refused.
    fn serve(&self, guest: Self::Guest) -> Result<(), String>;
}

/// Takes in whoever comes, until it is closed. A stranger is logged and refused.
pub fn receive<R: Reception>(listener: &TcpListener, reception: &Arc<R>) {
    let mut is_barred = false;
    for stream in listener.incoming() {
        if reception.is_closed() {
            return;
        }
        let stream = match stream {
            Ok(stream) => stream,
            // Who waits outside goes on doing so, and there is no descriptor for it.
            Err(error) => {
                if !std::mem::replace(&mut is_barred, true) {
                    tracing::warn!("connections have to wait: {error}");
                }
                thread::sleep(BARRED);
                continue;
            }
        };
        is_barred = false;
        let from = stream.peer_addr().map_or_else(|_| "an unknown address".into(), |a| a.to_string());
        let Ok(handle) = stream.try_clone() else { continue };
        let (number, evicted) = reception.strangers().enter(handle);
        if let Some(evicted) = evicted {
            // A connection that is gone already needs no closing.
            let _ = evicted.shutdown(Shutdown::Both);
        }
        let serving = Arc::clone(reception);
        let thread = thread::Builder::new().name(R::THREAD.into()).spawn(move || {
            let met = serving.prove(stream);
            serving.strangers().leave(number);
            let guest = match met {
                Ok(guest) => guest,
                // As one does that is ended just then.
                Err(HandshakeError::Io(error)) if error.kind() == ErrorKind::UnexpectedEof => {
                    return tracing::debug!("{from} has hung up: {error}");
                }
                Err(error) => return tracing::warn!("refused a connection from {from}: {error}"),
            };
            if let Err(reason) = serving.serve(guest) {
                tracing::warn!("refused a connection from {from}: {reason}");
            }
        });
        if let Err(error) = thread {
            reception.strangers().leave(number);
            tracing::warn!("refused a connection: no thread for it: {error}");
        }
    }
}
