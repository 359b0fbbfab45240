//! The new process of an upgrade: takes over the sockets, the state and the connections.

use std::{
    io,
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    panic::resume_unwind,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, SyncSender},
    },
    thread::{Scope, ScopedJoinHandle},
    time::Duration,
};

use rustix::{
    net::{AddressFamily, SocketType, sockopt},
    process::{Pid, geteuid, getppid},
};
use tidegate_limiter::{HandoverError, ServerLimiter, is_store_part, metrics::UpgradeResult};
use tidegate_net::{AdoptError, Adopter, MovedConnection, Server};

use super::{
    channel::{Channel, ChannelError, Kind, Message, VERSION},
    connection_body,
};

/// The maximum time without a message from the old process, except while it waits for its requests.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum number of parts of the memory store that wait for a thread that restores them.
const MAX_WAITING_PARTS: usize = 4;

/// The maximum number of listening sockets.
const MAX_LISTENERS: usize = 16;

/// The reason why this process cannot take over from an old process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeoverError {
    /// Standard input is not a Unix socket.
    #[error(
        "TIDEGATE_UPGRADE is set, but standard input is not a Unix socket; remove the variable, and start an upgrade with SIGUSR2 to the running server"
    )]
    NotASocket,
    /// The process that started this process is outside its PID namespace.
    #[error(
        "TIDEGATE_UPGRADE is set, but the process that started this process is outside its PID namespace; sockets of unknown processes are not used; start an upgrade with SIGUSR2 to the running server"
    )]
    ParentOutside,
    /// The socket belongs to a process that did not start this process.
    #[error(
        "TIDEGATE_UPGRADE is set, but the socket on standard input belongs to the process {pid} of the user {uid}, and not to the server that started this process; sockets of unknown processes are not used; start an upgrade with SIGUSR2 to the running server"
    )]
    UnknownProcess {
        /// The process that created the socket.
        pid: i32,
        /// Its user.
        uid: u32,
    },
    /// The old process speaks another version of the protocol.
    #[error(
        "the running server, version {program}, uses version {theirs} of the upgrade protocol, but this program supports only version {VERSION}; stop the running server and start this program"
    )]
    Version {
        /// The version of the running server.
        program: String,
        /// The version of the other process's messages.
        theirs: u32,
    },
    /// The messages of the old process cannot be used.
    #[error("cannot take over from the running server: {0}")]
    Channel(#[from] ChannelError),
    /// The state of the old process cannot be used.
    #[error("cannot take over the state of the running server: {0}")]
    State(#[from] HandoverError),
    /// The operating system reported an error.
    #[error("cannot take over from the running server: {0}")]
    System(#[from] io::Error),
}

/// A listening socket of the old process.
#[derive(Debug)]
pub(in crate::serve) struct PassedListener {
    pub(in crate::serve) name: String,
    pub(in crate::serve) socket: TcpListener,
    /// Whether the service manager has opened the socket.
    pub(in crate::serve) is_managed: bool,
}

/// A connection to the old process, which hands over its work.
#[derive(Debug)]
pub struct Takeover {
    channel: Channel,
    listeners: Vec<PassedListener>,
    reporter: TakeoverReporter,
    old_process: i32,
}

/// Reports to the old process that this process cannot take over. The connection to the old process
/// closes when this process has taken over.
#[derive(Clone, Debug)]
pub struct TakeoverReporter(Arc<Mutex<Option<Channel>>>);

impl TakeoverReporter {
    fn new(channel: Channel) -> Self {
        Self(Arc::new(Mutex::new(Some(channel))))
    }

    /// Reports `problem`. The old process logs the problem, and continues to serve. Has no effect
    /// after the takeover.
    pub fn fail(&self, problem: &str) {
        if let Some(channel) = self.take() {
            // If the old process does not listen, it notices that this process ends.
            let _ = channel.send(Kind::Failed, &[truncated(problem)], None);
        }
    }

    fn take(&self) -> Option<Channel> {
        let mut channel = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        channel.take()
    }
}

/// Returns the beginning of `text`, which fits into a message.
fn truncated(text: &str) -> &[u8] {
    const MAX_BYTES: usize = 4_096;
    &text.as_bytes()[..text.len().min(MAX_BYTES)]
}

impl Takeover {
    /// Connects to the old process, which started this process, through the socket on standard
    /// input, and receives the listening sockets of the old process.
    ///
    /// # Errors
    ///
    /// [`TakeoverError`] if standard input is not a socket of the process that started this one.
    pub fn from_stdin() -> Result<Self, TakeoverError> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        // The old process notices the end of this process only if no other descriptor is open. The
        // standard input is now a closed pipe, because `/dev/null` can be absent, as in an unpacked
        // image.
        let (closed, _) = io::pipe()?;
        rustix::stdio::dup2_stdin(closed).map_err(io::Error::from)?;
        Self::from_socket(socket, getppid())
    }

    fn from_socket(socket: OwnedFd, parent: Option<Pid>) -> Result<Self, TakeoverError> {
        let is_unix_socket = sockopt::socket_domain(&socket) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
        if !is_unix_socket {
            return Err(TakeoverError::NotASocket);
        }
        // For the socket of a process outside the PID namespace, the system reports the process 0.
        // The parent of the first process in the namespace has this number too.
        let parent = parent.ok_or(TakeoverError::ParentOutside)?;
        let peer = sockopt::socket_peercred(&socket).map_err(io::Error::from)?;
        if peer.pid != parent || peer.uid != geteuid() {
            return Err(TakeoverError::UnknownProcess {
                pid: peer.pid.as_raw_nonzero().get(),
                uid: peer.uid.as_raw(),
            });
        }
        let channel = Channel::new(UnixStream::from(socket), MESSAGE_TIMEOUT)?;
        let listeners = receive_listeners(&channel)?;
        Ok(Self {
            reporter: TakeoverReporter::new(channel.try_clone()?),
            channel,
            listeners,
            old_process: peer.pid.as_raw_nonzero().get(),
        })
    }

    /// Returns a handle with which this process reports that it cannot start.
    #[must_use]
    pub fn reporter(&self) -> TakeoverReporter {
        self.reporter.clone()
    }

    /// Takes the listening sockets.
    pub(in crate::serve) fn take_listeners(&mut self) -> Vec<PassedListener> {
        std::mem::take(&mut self.listeners)
    }

    /// Takes over the state and the connections, and starts to serve. `server` must not have begun
    /// to serve.
    ///
    /// # Errors
    ///
    /// [`TakeoverError`] if the old process continues to serve. This process must then exit.
    pub(in crate::serve) fn finish(
        mut self,
        server: &Server,
        limiter: &ServerLimiter,
    ) -> Result<(), TakeoverError> {
        // The old process waits for its open requests for up to its setting `shutdown.handover`.
        // The channel closes if the old process ends.
        self.channel.set_timeout(None)?;
        self.channel.send(Kind::Prepared, &[], None)?;
        limiter.begin_taking_state();
        let (connections, keys) = self.receive_state(limiter)?;
        limiter.end_taking_state()?;
        // After the commit, the old process no longer serves, so nothing may fail any more.
        let (start_adopting, starts) = mpsc::channel::<(Channel, Adopter)>();
        std::thread::Builder::new()
            .name("upgrade".to_owned())
            .spawn(move || {
                if let Ok((mut channel, adopter)) = starts.recv() {
                    keep_adopting(&mut channel, &adopter);
                }
            })?;
        self.channel.set_timeout(Some(MESSAGE_TIMEOUT))?;
        self.channel.send(Kind::Restored, &[], None)?;
        match self.channel.receive()?.kind {
            Kind::Commit => {}
            other => return Err(ChannelError::Unexpected(other as u8).into()),
        }
        drop(self.reporter.take());
        let adopter = server.adopter();
        server.begin_serving();
        limiter.metrics().count_upgrade(UpgradeResult::TakenOver);
        tracing::info!(
            old_process = self.old_process,
            keys,
            connections = connections.len(),
            "this process has taken over from the old process"
        );
        for connection in connections {
            adopt(&adopter, connection);
        }
        // The thread waits for the channel.
        let _ = start_adopting.send((self.channel, adopter));
        Ok(())
    }

    /// Receives the connections and the state. Returns the connections, and the number of keys in
    /// the state.
    fn receive_state(
        &self,
        limiter: &ServerLimiter,
    ) -> Result<(Vec<MovedConnection>, usize), TakeoverError> {
        std::thread::scope(|scope| {
            let (mut connections, mut restorer) = (Vec::new(), None);
            loop {
                let message = self.channel.receive()?;
                match message.kind {
                    Kind::Connection => connections.extend(moved(message)),
                    Kind::State => match message.body.split_first() {
                        // With Redis, there are no parts of the memory store.
                        Some((tag, _)) if is_store_part(*tag) => {
                            let restorer = match &mut restorer {
                                Some(restorer) => restorer,
                                None => restorer.insert(Restorer::start(scope, limiter)?),
                            };
                            restorer.restore(message.body);
                        }
                        Some((tag, record)) => drop(limiter.take_state(*tag, record)?),
                        None => return Err(ChannelError::NotAMessage("no record").into()),
                    },
                    Kind::End => break,
                    other => return Err(ChannelError::Unexpected(other as u8).into()),
                }
            }
            let keys = restorer.map_or(Ok(0), Restorer::finish)?;
            Ok((connections, keys))
        })
    }
}

/// The threads that restore the parts of the memory store.
///
/// Requests wait while the parts are restored, and restoring a part takes longer than receiving it.
/// Therefore there are several threads.
struct Restorer<'scope> {
    /// Dropping this sender ends the threads.
    parts: SyncSender<Vec<u8>>,
    threads: Vec<ScopedJoinHandle<'scope, Result<usize, HandoverError>>>,
}

impl<'scope> Restorer<'scope> {
    fn start(scope: &'scope Scope<'scope, '_>, limiter: &'scope ServerLimiter) -> io::Result<Self> {
        let (parts, received) = mpsc::sync_channel(MAX_WAITING_PARTS);
        // Only the threads own the receiver. If all threads panic, the receiver is dropped, so that
        // the sender does not wait.
        let received = Arc::new(Mutex::new(received));
        let start = |number| {
            let received = Arc::clone(&received);
            std::thread::Builder::new()
                .name(format!("restore-{number}"))
                .spawn_scoped(scope, move || restore_parts(limiter, &received))
        };
        let threads = (0..Server::default_workers()).map(start);
        Ok(Self {
            threads: threads.collect::<io::Result<_>>()?,
            parts,
        })
    }

    /// Restores `part` in one of the threads.
    fn restore(&self, part: Vec<u8>) {
        // Sending fails only if all threads have panicked, which `finish` reports.
        let _ = self.parts.send(part);
    }

    /// Waits until all parts are restored. Returns the number of keys in the parts.
    fn finish(self) -> Result<usize, HandoverError> {
        drop(self.parts);
        let restored = self.threads.into_iter().map(|thread| {
            let restored = thread.join();
            restored.unwrap_or_else(|panic| resume_unwind(panic))
        });
        restored.sum()
    }
}

/// Restores the received parts of the memory store. Returns the number of keys in the parts.
fn restore_parts(
    limiter: &ServerLimiter,
    received: &Mutex<Receiver<Vec<u8>>>,
) -> Result<usize, HandoverError> {
    let next = || {
        let received = received.lock().unwrap_or_else(PoisonError::into_inner);
        received.recv().ok()
    };
    let mut restored = Ok(0);
    // After an error, further parts are dropped, so that the sender does not wait.
    while let Some(part) = next() {
        if let (Ok(keys), Some((tag, record))) = (&mut restored, part.split_first()) {
            match limiter.take_state(*tag, record) {
                Ok(more) => *keys += more,
                Err(error) => restored = Err(error),
            }
        }
    }
    restored
}

fn receive_listeners(channel: &Channel) -> Result<Vec<PassedListener>, TakeoverError> {
    let hello = channel.receive()?;
    if hello.kind != Kind::Hello {
        return Err(ChannelError::Unexpected(hello.kind as u8).into());
    }
    let (theirs, program) = hello
        .body
        .split_first_chunk()
        .ok_or(ChannelError::NotAMessage("no version"))?;
    let theirs = u32::from_le_bytes(*theirs);
    if theirs != VERSION {
        return Err(TakeoverError::Version {
            program: String::from_utf8_lossy(program).into_owned(),
            theirs,
        });
    }
    let mut listeners = Vec::new();
    loop {
        let message = channel.receive()?;
        match message.kind {
            Kind::Listener if listeners.len() < MAX_LISTENERS => {
                listeners.push(passed_listener(message)?);
            }
            Kind::Start => return Ok(listeners),
            other => return Err(ChannelError::Unexpected(other as u8).into()),
        }
    }
}

fn passed_listener(message: Message) -> Result<PassedListener, ChannelError> {
    let Some(socket) = message.socket else {
        return Err(ChannelError::NotAMessage("no socket"));
    };
    let Some((is_managed @ (0 | 1), name)) = message.body.split_first() else {
        return Err(ChannelError::NotAMessage("no name"));
    };
    Ok(PassedListener {
        name: String::from_utf8_lossy(name).into_owned(),
        socket: TcpListener::from(socket),
        is_managed: *is_managed == 1,
    })
}

/// Returns the connection in `message`. Returns `None` and logs a warning if it cannot be used.
fn moved(message: Message) -> Option<MovedConnection> {
    let unusable = |reason| {
        tracing::warn!("a connection of the old process was closed, because its message {reason}");
    };
    let Some(socket) = message.socket else {
        // The system does not pass a socket if this process has too many open files.
        unusable("has no socket; check the maximum number of open files");
        return None;
    };
    let Some(body) = connection_body::decode(&message.body) else {
        unusable("is invalid");
        return None;
    };
    Some(MovedConnection {
        listener: body.listener,
        socket: TcpStream::from(socket),
        relayed: body.relayed,
        state: body.state.to_vec(),
    })
}

/// Serves the connections that the old process hands over until it ends.
fn keep_adopting(channel: &mut Channel, adopter: &Adopter) {
    if let Err(error) = channel.set_timeout(None) {
        tracing::warn!(%error, "connections of the old process may be closed");
    }
    loop {
        match channel.receive() {
            Ok(message) if message.kind == Kind::Connection => {
                if let Some(connection) = moved(message) {
                    adopt(adopter, connection);
                }
            }
            Ok(_) => {}
            Err(ChannelError::Closed) => return,
            Err(error) => {
                return tracing::warn!(%error, "cannot take over further connections from the old process");
            }
        }
    }
}

fn adopt(adopter: &Adopter, connection: MovedConnection) {
    match adopter.adopt(connection) {
        Ok(()) => {}
        // The client has disconnected.
        Err(AdoptError::Socket(error)) => {
            tracing::debug!(%error, "a connection was lost during the upgrade");
        }
        Err(AdoptError::NoListener(address)) => tracing::info!(
            %address,
            "a connection of the old process was closed, because its listener no longer exists"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use rustix::process::getpid;
    use tidegate::Clock;
    use tidegate_config::Config;
    use tidegate_core::{MemoryBounds, MemoryStore};

    use super::*;

    type Sent = (Kind, Vec<u8>);

    /// Returns the result of a process with the parent `parent`, whose standard input is connected
    /// to a process that sends `messages` and ends.
    fn received(parent: Option<Pid>, messages: &[Sent]) -> Result<Vec<PassedListener>, String> {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let old = Channel::new(theirs, MESSAGE_TIMEOUT).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for (kind, body) in messages {
            let socket = (*kind == Kind::Listener).then(|| listener.as_fd());
            old.send(*kind, &[body], socket).unwrap();
        }
        drop(old);
        let taken = Takeover::from_socket(ours.into(), parent);
        taken
            .map(|mut taken| taken.take_listeners())
            .map_err(|error| error.to_string())
    }

    fn hello(version: u32) -> Sent {
        let body = [&version.to_le_bytes()[..], b"7.0.0"].concat();
        (Kind::Hello, body)
    }

    fn message(kind: Kind, body: &[u8]) -> Sent {
        (kind, body.to_vec())
    }

    fn limiter() -> ServerLimiter {
        let store = MemoryStore::new(MemoryBounds::default());
        let rules = Config::parse("").unwrap().rules;
        ServerLimiter::new(rules, store, Clock::real())
    }

    // In these tests, the process itself has created the sockets.
    fn own() -> Option<Pid> {
        Some(getpid())
    }

    #[test]
    fn the_listening_sockets_of_the_parent_are_used() {
        let messages = [
            hello(VERSION),
            message(Kind::Listener, b"\x00http"),
            message(Kind::Listener, b"\x01admin"),
            message(Kind::Start, b""),
        ];
        let listeners = received(own(), &messages).unwrap();
        let names = listeners.iter().map(|one| (&*one.name, one.is_managed));
        assert!(names.eq([("http", false), ("admin", true)]));
    }

    #[test]
    fn a_socket_of_an_unknown_process_is_refused() {
        let messages = [hello(VERSION), message(Kind::Start, b"")];
        for (parent, said) in [
            (
                None,
                "is outside its PID namespace; sockets of unknown processes",
            ),
            (getppid(), "belongs to the process"),
        ] {
            let error = received(parent, &messages).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        for input in [OwnedFd::from(file), OwnedFd::from(tcp)] {
            let error = Takeover::from_socket(input, own()).unwrap_err().to_string();
            assert!(error.contains("not a Unix socket"), "{error}");
        }
    }

    /// After the takeover, the old process ends its side of the connection. The old process then
    /// reads the end of the stream, because this process has no open descriptor of the connection.
    #[test]
    fn no_descriptor_of_the_connection_stays_open_after_the_takeover() {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let old = Channel::new(theirs.try_clone().unwrap(), MESSAGE_TIMEOUT).unwrap();
        let (kind, body) = hello(VERSION);
        old.send(kind, &[&body], None).unwrap();
        for kind in [Kind::Start, Kind::End, Kind::Commit] {
            old.send(kind, &[], None).unwrap();
        }
        let taken = Takeover::from_socket(ours.into(), own()).unwrap();
        let reporter = taken.reporter();
        let server = Server::start_waiting(1).unwrap();
        taken.finish(&server, &limiter()).unwrap();
        for kind in [Kind::Prepared, Kind::Restored] {
            assert_eq!(old.receive().unwrap().kind, kind);
        }
        theirs.shutdown(Shutdown::Write).unwrap();
        assert!(matches!(old.receive(), Err(ChannelError::Closed)));
        reporter.fail("this report has no effect");
    }

    /// Connections arrive before and after the takeover.
    #[test]
    fn unusable_connections_are_logged() {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let old = Channel::new(theirs.try_clone().unwrap(), MESSAGE_TIMEOUT).unwrap();
        let mut new = Channel::new(ours.try_clone().unwrap(), MESSAGE_TIMEOUT).unwrap();
        let (kind, body) = hello(VERSION);
        old.send(kind, &[&body], None).unwrap();
        old.send(Kind::Start, &[], None).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let send_unusable = || {
            old.send(Kind::Connection, &[], None).unwrap();
            let socket = Some(socket.as_fd());
            old.send(Kind::Connection, &[b"invalid"], socket).unwrap();
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(Arc::new(file.reopen().unwrap()))
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let taken = Takeover::from_socket(ours.into(), own()).unwrap();
            send_unusable();
            old.send(Kind::End, &[], None).unwrap();
            let (connections, _) = taken.receive_state(&limiter()).unwrap();
            assert_eq!(connections.len(), 0);
            let server = Server::start_waiting(1).unwrap();
            send_unusable();
            theirs.shutdown(Shutdown::Write).unwrap();
            keep_adopting(&mut new, &server.adopter());
        });
        let log = std::fs::read_to_string(file.path()).unwrap();
        for reason in ["has no socket", "is invalid"] {
            let reason =
                format!("connection of the old process was closed, because its message {reason}");
            assert_eq!(log.matches(&reason).count(), 2, "{log}");
        }
    }

    /// The new process waits for the state without a timeout, because the old process limits the
    /// time for its requests in progress.
    #[test]
    fn the_state_of_the_old_process_may_take_any_time() {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let old = Channel::new(theirs, MESSAGE_TIMEOUT).unwrap();
        let (kind, body) = hello(VERSION);
        old.send(kind, &[&body], None).unwrap();
        old.send(Kind::Start, &[], None).unwrap();
        let socket = ours.try_clone().unwrap();
        let taken = Takeover::from_socket(ours.into(), own()).unwrap();
        assert_eq!(socket.read_timeout().unwrap(), Some(MESSAGE_TIMEOUT));
        let taking = std::thread::spawn(move || {
            let server = Server::start_waiting(1).unwrap();
            taken.finish(&server, &limiter()).unwrap();
        });
        assert_eq!(old.receive().unwrap().kind, Kind::Prepared);
        assert_eq!(socket.read_timeout().unwrap(), None);
        old.send(Kind::End, &[], None).unwrap();
        assert_eq!(old.receive().unwrap().kind, Kind::Restored);
        assert_eq!(socket.read_timeout().unwrap(), Some(MESSAGE_TIMEOUT));
        drop(socket);
        old.send(Kind::Commit, &[], None).unwrap();
        taking.join().unwrap();
    }

    /// The number of parts exceeds the number that can wait for a thread.
    #[test]
    fn invalid_parts_of_the_memory_store_are_refused() {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let old = Channel::new(theirs, MESSAGE_TIMEOUT).unwrap();
        let (kind, body) = hello(VERSION);
        old.send(kind, &[&body], None).unwrap();
        old.send(Kind::Start, &[], None).unwrap();
        let invalid_part = [1, 9];
        assert!(is_store_part(invalid_part[0]));
        for _ in 0..MAX_WAITING_PARTS + 100 {
            old.send(Kind::State, &[&invalid_part], None).unwrap();
        }
        old.send(Kind::End, &[], None).unwrap();
        let taken = Takeover::from_socket(ours.into(), own()).unwrap();
        let server = Server::start_waiting(1).unwrap();
        let error = taken.finish(&server, &limiter()).unwrap_err().to_string();
        assert!(
            error.contains("the snapshot is invalid from byte 0 on"),
            "{error}"
        );
    }

    #[test]
    fn unknown_messages_are_refused() {
        let mut too_many = vec![hello(VERSION)];
        too_many.resize(MAX_LISTENERS + 2, message(Kind::Listener, b"\x00http"));
        for (messages, said) in [
            (
                vec![hello(VERSION + 8)],
                "uses version 10 of the upgrade protocol",
            ),
            (vec![message(Kind::Hello, b"\x01\0\0")], "no version"),
            (vec![message(Kind::Start, b"")], "an unexpected message"),
            (
                vec![hello(VERSION), message(Kind::Commit, b"")],
                "an unexpected message",
            ),
            (vec![hello(VERSION)], "has closed the connection"),
            (
                vec![hello(VERSION), message(Kind::Listener, b"")],
                "no name",
            ),
            (too_many, "an unexpected message"),
        ] {
            let error = received(own(), &messages).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
