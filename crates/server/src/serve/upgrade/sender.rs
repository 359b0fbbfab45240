//! The old process of an upgrade: starts the new process, and hands over its work.
//!
//! A thread talks to the new process, so that the server continues to serve and to handle signals.
//! The thread reports its progress to the server, and the server sends orders to the thread.

use std::{
    ffi::OsString,
    io,
    net::TcpListener,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Command, ExitStatus},
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread::JoinHandle,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};
use tidegate_limiter::ServerLimiter;
use tidegate_net::MovedConnection;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{
    channel::{Channel, ChannelError, Kind, Message, VERSION},
    connection_body,
};
use crate::serve::service_manager;

/// The maximum time in which the new process must be prepared: it reads its files, binds its
/// listeners and connects to Redis.
const PREPARATION_TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum time of each read and write during the handover.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum time between the end of the new process's socket and the end of the process.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The program that an upgrade starts.
#[derive(Clone, Debug)]
pub struct Program {
    /// The path under which this program was started. If another file has replaced the program at
    /// this path, the new process runs that file.
    pub path: OsString,
    /// The arguments.
    pub arguments: Vec<OsString>,
    /// The environment variable that tells the new process to take over.
    pub variable: &'static str,
}

/// A listening socket of this process, which a new process can use.
#[derive(Debug)]
pub(in crate::serve) struct OwnListener {
    pub(in crate::serve) name: &'static str,
    pub(in crate::serve) socket: TcpListener,
    /// Whether the service manager has opened the socket.
    pub(in crate::serve) is_managed: bool,
}

/// The reason why no new process has taken over.
#[derive(Debug, thiserror::Error)]
pub(in crate::serve) enum UpgradeError {
    #[error("cannot start {}: {source}; check that the program exists and is executable", .path.display())]
    Start { path: OsString, source: io::Error },
    #[error("the new process reported: {0}")]
    Reported(String),
    #[error("the new process ended ({0}) before it could take over; its log says why")]
    Ended(String),
    #[error("{0}; the new process was stopped")]
    Channel(#[from] ChannelError),
    #[error("{0}; the new process was stopped")]
    System(#[from] io::Error),
}

impl UpgradeError {
    /// Returns whether the error means that the new process has ended.
    fn is_of_ended_process(&self) -> bool {
        let system = match self {
            Self::Channel(ChannelError::Closed) => return true,
            Self::Channel(ChannelError::System(error)) | Self::System(error) => error,
            _ => return false,
        };
        // The system resets the connection if the process has left messages unread.
        matches!(
            system.kind(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
        )
    }
}

/// A report of the thread to the server.
#[derive(Debug)]
pub(in crate::serve) enum UpgradeReport {
    /// The new process can take over. The server must stop deciding, hand over its connections,
    /// and then order the handover of the state.
    Prepared,
    /// The new process decides from now on.
    Committed,
    /// The new process has failed, and this process must continue to serve.
    Failed(UpgradeError),
}

/// An order of the server to the thread.
enum Order {
    Connection(MovedConnection),
    State(Arc<ServerLimiter>),
    /// Gives back the connections after a failure.
    GiveBack(Sender<Vec<MovedConnection>>),
    Finish,
}

/// An upgrade in progress.
#[derive(Debug)]
pub(in crate::serve) struct Upgrade {
    orders: Sender<Order>,
    reports: UnboundedReceiver<UpgradeReport>,
    thread: JoinHandle<()>,
}

impl Upgrade {
    /// Starts the new process.
    pub(in crate::serve) fn start(
        program: Program,
        listeners: &[OwnListener],
    ) -> Result<Self, UpgradeError> {
        let listeners = listeners.iter().map(|own| -> io::Result<OwnListener> {
            let socket = own.socket.try_clone()?;
            Ok(OwnListener { socket, ..*own })
        });
        let listeners = listeners.collect::<io::Result<Vec<OwnListener>>>()?;
        let (orders, incoming) = mpsc::channel();
        let (outgoing, reports) = unbounded_channel();
        let thread = std::thread::Builder::new()
            .name("upgrade".to_owned())
            .spawn(move || run(&program, listeners, &incoming, &outgoing))?;
        Ok(Self {
            orders,
            reports,
            thread,
        })
    }

    /// Waits for the next report. The future can be dropped and created again.
    pub(in crate::serve) async fn report(&mut self) -> UpgradeReport {
        let ended = || UpgradeReport::Failed(io::Error::other("the thread has ended").into());
        self.reports.recv().await.unwrap_or_else(ended)
    }

    /// Returns a function that hands over connections.
    pub(in crate::serve) fn mover(&self) -> impl Fn(MovedConnection) + Send + use<> {
        let orders = self.orders.clone();
        move |moved| {
            // The thread ends only after the last connection.
            let _ = orders.send(Order::Connection(moved));
        }
    }

    /// Hands over the state of `limiter`, which decides nothing afterwards. The new process then
    /// sends a report.
    pub(in crate::serve) fn send_state(&self, limiter: &Arc<ServerLimiter>) {
        let _ = self.orders.send(Order::State(Arc::clone(limiter)));
    }

    /// Returns the connections that were handed over to a process that has failed.
    pub(in crate::serve) fn give_back(self) -> Vec<MovedConnection> {
        let (back, returned) = mpsc::channel();
        let _ = self.orders.send(Order::GiveBack(back));
        returned.recv().unwrap_or_default()
    }

    /// Ends the upgrade after all connections are closed or handed over.
    pub(in crate::serve) fn finish(self) {
        let _ = self.orders.send(Order::Finish);
        let _ = self.thread.join();
    }
}

/// A new process that has not taken over yet.
struct NewProcess {
    child: Child,
    channel: Channel,
}

fn run(
    program: &Program,
    listeners: Vec<OwnListener>,
    orders: &Receiver<Order>,
    reports: &UnboundedSender<UpgradeReport>,
) {
    let mut moved = Vec::new();
    let committed = start(program).and_then(|mut new| {
        let taken = new.prepare(listeners).and_then(|()| {
            let _ = reports.send(UpgradeReport::Prepared);
            new.hand_over(orders, &mut moved)
        });
        match taken {
            Ok(()) => Ok(new),
            Err(error) => Err(new.stop(error)),
        }
    });
    match committed {
        Ok(NewProcess { channel, .. }) => {
            // The new process now owns these connections.
            drop(moved);
            let _ = reports.send(UpgradeReport::Committed);
            forward(orders, &channel);
        }
        Err(error) => {
            let _ = reports.send(UpgradeReport::Failed(error));
            give_back(orders, moved);
        }
    }
}

fn start(program: &Program) -> Result<NewProcess, UpgradeError> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(&program.path);
    command
        .args(&program.arguments)
        .env(program.variable, "1")
        .stdin(OwnedFd::from(theirs));
    // These variables are only for this process.
    for variable in ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID"] {
        command.env_remove(variable);
    }
    let child = command.spawn().map_err(|source| UpgradeError::Start {
        path: program.path.clone(),
        source,
    })?;
    // The command owns a copy of the socket of the new process. While this copy is open, this
    // process does not notice when the new process closes its socket.
    drop(command);
    tracing::info!(
        process = child.id(), program = %program.path.display(),
        "upgrade: the new process starts; this process continues to serve"
    );
    Ok(NewProcess {
        child,
        channel: Channel::new(ours, PREPARATION_TIMEOUT)?,
    })
}

impl NewProcess {
    /// Sends the listening sockets, and waits until the new process is prepared.
    fn prepare(&mut self, listeners: Vec<OwnListener>) -> Result<(), UpgradeError> {
        let version = VERSION.to_le_bytes();
        let program = env!("CARGO_PKG_VERSION").as_bytes();
        self.channel.send(Kind::Hello, &[&version, program], None)?;
        for own in listeners {
            let is_managed = [u8::from(own.is_managed)];
            let body = [&is_managed[..], own.name.as_bytes()];
            let socket = Some(own.socket.as_fd());
            self.channel.send(Kind::Listener, &body, socket)?;
        }
        self.channel.send(Kind::Start, &[], None)?;
        self.expect(Kind::Prepared)?;
        self.channel.set_timeout(Some(STEP_TIMEOUT))?;
        Ok(())
    }

    /// Hands over the connections and the state. When this function returns successfully, the new
    /// process makes all decisions. Adds the connections to `moved`, so that they stay open in this
    /// process.
    fn hand_over(
        &self,
        orders: &Receiver<Order>,
        moved: &mut Vec<MovedConnection>,
    ) -> Result<(), UpgradeError> {
        let limiter = loop {
            match orders.recv() {
                Ok(Order::Connection(connection)) => {
                    let sent = send_connection(&self.channel, &connection);
                    moved.push(connection);
                    sent?;
                }
                Ok(Order::State(limiter)) => break limiter,
                Ok(Order::GiveBack(_) | Order::Finish) | Err(_) => {
                    let stopped = io::Error::other("the server is shutting down");
                    return Err(stopped.into());
                }
            }
        };
        let mut bytes = 0;
        limiter.send_state(&mut |tag, record| {
            bytes += record.len();
            self.channel.send(Kind::State, &[&[tag], record], None)
        })?;
        self.channel.send(Kind::End, &[], None)?;
        self.expect(Kind::Restored)?;
        self.channel.send(Kind::Commit, &[], None)?;
        // The service manager must know the new process before this process ends, but not before
        // the commit has succeeded. The service manager accepts the notification only from the
        // process that it knows.
        service_manager::main_process(self.child.id());
        tracing::info!(
            process = self.child.id(),
            connections = moved.len(),
            state_bytes = bytes,
            "upgrade: the new process serves; this process finishes its requests in progress"
        );
        Ok(())
    }

    /// Waits for a message of this kind.
    fn expect(&self, kind: Kind) -> Result<(), UpgradeError> {
        let Message {
            kind: received,
            body,
            ..
        } = self.channel.receive()?;
        if received == kind {
            return Ok(());
        }
        Err(match received {
            Kind::Failed => UpgradeError::Reported(String::from_utf8_lossy(&body).into_owned()),
            other => ChannelError::Unexpected(other as u8).into(),
        })
    }

    /// Stops the new process, and returns the reason for its failure.
    fn stop(mut self, error: UpgradeError) -> UpgradeError {
        if error.is_of_ended_process() {
            // A process that has closed its socket usually ends, and its exit status is the reason.
            let status = self.status_within(END_TIMEOUT);
            if let Ok(Some(status)) = status {
                return UpgradeError::Ended(status.to_string());
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        error
    }

    /// Waits until the new process ends, at most for `timeout`.
    fn status_within(&mut self, timeout: Duration) -> io::Result<Option<ExitStatus>> {
        let process = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout))?;
        self.child.try_wait()
    }
}

fn send_connection(channel: &Channel, connection: &MovedConnection) -> io::Result<()> {
    let head = connection_body::encode_head(connection);
    let body = [&head[..], &connection.state];
    channel.send(Kind::Connection, &body, Some(connection.socket.as_fd()))
}

/// Hands over further connections until the last one is closed.
fn forward(orders: &Receiver<Order>, channel: &Channel) {
    while let Ok(order) = orders.recv() {
        match order {
            Order::Connection(connection) => {
                if let Err(error) = send_connection(channel, &connection) {
                    tracing::warn!(%error, "a connection was closed, because it could not be handed over to the new process");
                }
            }
            Order::Finish => return,
            Order::State(_) | Order::GiveBack(_) => {}
        }
    }
}

/// Collects the connections that are still being moved, until the server wants them back.
fn give_back(orders: &Receiver<Order>, mut moved: Vec<MovedConnection>) {
    while let Ok(order) = orders.recv() {
        match order {
            Order::Connection(connection) => moved.push(connection),
            Order::GiveBack(back) => {
                let _ = back.send(moved);
                return;
            }
            Order::Finish => return,
            Order::State(_) => {}
        }
    }
}
