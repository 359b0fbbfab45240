//! The Redis-protocol door: `CL.THROTTLE`, `THROTTLE` and `TIDEGATE.CHECK` for any Redis client.
//!
//! Read in this order, the modules tell a connection's story: `connection` moves bytes and watches the
//! clock, `desk` answers every command that has arrived whole, `parse` takes a few of them apart without copying
//! them, `command` runs one, `reply` writes the answer, and `waiting` holds what Redis is still to decide.
//!
//! What is read together is parsed, decided and answered together, with one `read` and one `write`, and what the store
//! keeps of the keys is fetched before the first is decided: that is why a pipeline is fast. All throttles of such a batch are decided at one
//! instant, the one at which the batch was taken up.
//!
//! A client can make this door hold a bounded amount of memory, whatever it sends or does not read: every
//! maximum has a name in [`bounds`].

pub mod bounds;

mod command;
mod connection;
mod desk;
mod inline;
mod limits_cache;
mod parse;
mod reply;
mod session;
mod transaction;
mod waiting;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use self::{desk::Desk, session::Session};
use super::{Authenticator, auth};
use crate::{
    limiter::Limiter,
    net::{Bounds, Listener, Server, Tls},
};

/// The bounds of this door's connections, unless configured: those of every door, but a connection may be
/// quiet for an hour, because pools keep connections and take it ill when one is gone.
#[must_use]
pub fn default_bounds() -> Bounds {
    Bounds {
        idle: Duration::from_secs(3_600),
        ..Bounds::default()
    }
}

/// Answers the Redis protocol on `socket`.
///
/// # Errors
///
/// What the system says if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    limiter: Arc<Limiter>,
) -> io::Result<Listener> {
    let served = Served {
        limiter,
        username: None,
        password: None,
        tls: None,
    };
    listen_guarded(server, socket, bounds, served)
}

/// What the Redis door needs.
#[derive(Clone)]
pub struct Served {
    /// Who decides.
    pub limiter: Arc<Limiter>,
    /// The user whom `AUTH` must name; `None` is `default`.
    pub username: Option<String>,
    /// What `AUTH` must say; without one, everybody may ask.
    pub password: Option<String>,
    /// The listener's certificate; without one clients speak in the clear.
    pub tls: Option<Arc<Tls>>,
}

/// Passwords are not written to logs.
impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Served")
            .field("username", &self.username)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// As [`listen`], for those who authenticate as `served` has it.
///
/// # Errors
///
/// What the system says if `socket` is not a listening socket.
pub fn listen_guarded(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    served: Served,
) -> io::Result<Listener> {
    let Served {
        limiter,
        username,
        password,
        tls,
    } = served;
    let clock = limiter.clock().clone();
    let username: Arc<str> = username.as_deref().unwrap_or(session::DEFAULT_USER).into();
    let password = password.filter(|password| !password.is_empty());
    let secret = password.map(|password| auth::login(username.as_bytes(), password.as_bytes()));
    let authenticator = Authenticator::new("resp", secret.as_deref(), clock);
    let authenticator = Arc::new(authenticator);
    limiter
        .metrics()
        .show_authenticator(Arc::clone(&authenticator));
    server.listen(socket, bounds, move |stream, connection| {
        let (limiter, tls) = (Arc::clone(&limiter), tls.clone());
        let session =
            Session::new(Session::next_id(), connection.peer).guarded_by(&authenticator, &username);
        async move {
            let Some(tls) = tls else {
                return connection::serve(session, stream, connection, limiter).await;
            };
            if let Some(stream) = tls.accept_in_time(stream, &connection).await {
                connection::serve(session, stream, connection, limiter).await;
            }
        }
    })
}

/// What a client that sends `input` and leaves is answered: the door without a socket, for tests and
/// fuzzing, and without a fleet. The client is number 1.
#[must_use]
pub fn transcript(limiter: &Limiter, input: &[u8]) -> Vec<u8> {
    let mut session = Session::new(1, SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
    let mut desk = Desk::default();
    let (mut at, mut output) = (0, Vec::new());
    loop {
        let progress = desk.answer(limiter, &mut session, &input[at..]);
        output.extend_from_slice(&desk.output);
        at += progress.used;
        if !progress.more {
            return output;
        }
    }
}
