//! The access log: one line of JSON per request, written when the request has ended.
//!
//! A separate thread writes it, so no request waits for the disk. Lines that it cannot keep up with
//! are dropped and counted. `Host` and `User-Agent` are the only headers that are logged, and
//! queries only if configured, because the others may contain secrets.

mod entry;

use std::{
    fmt,
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::Duration,
};

pub(super) use self::entry::{AskedOf, Logged, Logging, Session};
use crate::config;

/// The maximum number of queued lines, and their maximum size in bytes.
const MAX_WAITING: usize = 16_384;
const MAX_WAITING_BYTES: usize = 16 << 20;

/// How long shutdown waits for queued lines to be written.
const FINISH_WITHIN: Duration = Duration::from_secs(2);

/// A handle to the open access log.
#[derive(Clone)]
pub struct AccessLog {
    orders: SyncSender<Order>,
    lost: Arc<AtomicU64>,
    waiting_bytes: Arc<AtomicUsize>,
    query: bool,
}

enum Order {
    Write(String),
    Reopen,
    /// Write everything before this, then reply.
    Finish(SyncSender<()>),
}

impl AccessLog {
    /// Opens the log of `settings` for appending.
    ///
    /// # Errors
    ///
    /// The operating system's error if the file cannot be opened or the thread cannot be started.
    pub fn open(settings: &config::AccessLog) -> io::Result<Self> {
        let file = settings.to.as_deref().map(open).transpose()?;
        let (orders, inbox) = sync_channel(MAX_WAITING);
        let lost = Arc::<AtomicU64>::default();
        let waiting_bytes = Arc::<AtomicUsize>::default();
        let writer = Writer {
            out: out(file),
            path: settings.to.clone(),
            lost: Arc::clone(&lost),
            waiting_bytes: Arc::clone(&waiting_bytes),
        };
        std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || writer.run(&inbox))?;
        Ok(Self {
            orders,
            lost,
            waiting_bytes,
            query: settings.query,
        })
    }

    /// Reopens the file, after log rotation has moved it. Does nothing if the queue is full.
    pub fn reopen(&self) {
        let _ = self.orders.try_send(Order::Reopen);
    }

    /// Waits until the queued lines are written, for at most 2 seconds. Returns at once if the
    /// queue is full.
    pub fn finish(&self) {
        let (done, wait) = sync_channel(1);
        if self.orders.try_send(Order::Finish(done)).is_ok() {
            let _ = wait.recv_timeout(FINISH_WITHIN);
        }
    }

    /// Returns how many lines were dropped.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn write(&self, line: String) {
        let bytes = line.len();
        let waiting = self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        let has_room = waiting.saturating_add(bytes) <= MAX_WAITING_BYTES;
        if !has_room || self.orders.try_send(Order::Write(line)).is_err() {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for AccessLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessLog")
            .field("query", &self.query)
            .finish_non_exhaustive()
    }
}

/// The state of the writer thread.
struct Writer {
    out: BufWriter<Box<dyn Write + Send>>,
    path: Option<PathBuf>,
    lost: Arc<AtomicU64>,
    waiting_bytes: Arc<AtomicUsize>,
}

impl Writer {
    /// Writes until all handles are dropped. Flushes once per batch of queued lines.
    fn run(mut self, inbox: &Receiver<Order>) {
        while let Ok(order) = inbox.recv() {
            self.follow(order);
            while let Ok(order) = inbox.try_recv() {
                self.follow(order);
            }
            self.flush();
        }
    }

    fn follow(&mut self, order: Order) {
        match order {
            Order::Write(line) => {
                self.waiting_bytes.fetch_sub(line.len(), Ordering::Relaxed);
                if let Err(error) = self.out.write_all(line.as_bytes()) {
                    tracing::error!("cannot write the access log: {error}");
                    self.lost.fetch_add(1, Ordering::Relaxed);
                }
            }
            Order::Reopen => self.reopen(),
            Order::Finish(done) => {
                self.flush();
                let _ = done.try_send(());
            }
        }
    }

    fn reopen(&mut self) {
        let Some(path) = &self.path else { return };
        match open(path) {
            Ok(file) => {
                self.flush();
                self.out = out(Some(file));
            }
            Err(error) => tracing::error!(
                file = %path.display(),
                "failed to reopen access log: {error}; keeping the current file"
            ),
        }
    }

    fn flush(&mut self) {
        if let Err(error) = self.out.flush() {
            tracing::error!("cannot write the access log: {error}");
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Readable by the owner and the group only, for the log shipper: addresses and paths are
    // private.
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o640)
        .open(path)
}

fn out(file: Option<File>) -> BufWriter<Box<dyn Write + Send>> {
    BufWriter::new(match file {
        Some(file) => Box::new(file),
        None => Box::new(io::stdout()),
    })
}
