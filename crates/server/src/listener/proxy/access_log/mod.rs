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

pub(crate) use self::entry::{AccessLogService, LogContext, LoggedUpstream, Session};
use crate::config;

/// The maximum number of queued lines, and their maximum size in bytes.
const MAX_QUEUED_LINES: usize = 16_384;
const MAX_QUEUED_BYTES: usize = 16 << 20;

/// How long shutdown waits for queued lines to be written.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// A handle to the open access log.
#[derive(Clone)]
pub struct AccessLog {
    commands: SyncSender<LogCommand>,
    lost: Arc<AtomicU64>,
    queued_bytes: Arc<AtomicUsize>,
    query: bool,
}

enum LogCommand {
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
        let (commands, inbox) = sync_channel(MAX_QUEUED_LINES);
        let lost = Arc::<AtomicU64>::default();
        let queued_bytes = Arc::<AtomicUsize>::default();
        let writer = Writer {
            out: out(file),
            path: settings.to.clone(),
            lost: Arc::clone(&lost),
            queued_bytes: Arc::clone(&queued_bytes),
        };
        std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || writer.run(&inbox))?;
        Ok(Self {
            commands,
            lost,
            queued_bytes,
            query: settings.query,
        })
    }

    /// Reopens the file, after log rotation has moved it. Does nothing if the queue is full.
    pub fn reopen(&self) {
        let _ = self.commands.try_send(LogCommand::Reopen);
    }

    /// Waits until the queued lines are written, for at most 2 seconds. Returns at once if the
    /// queue is full.
    pub fn finish(&self) {
        let (done, wait) = sync_channel(1);
        if self.commands.try_send(LogCommand::Finish(done)).is_ok() {
            let _ = wait.recv_timeout(FINISH_TIMEOUT);
        }
    }

    /// Returns how many lines were dropped.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn write(&self, line: String) {
        let bytes = line.len();
        let queued = self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let has_room = queued.saturating_add(bytes) <= MAX_QUEUED_BYTES;
        if !has_room || self.commands.try_send(LogCommand::Write(line)).is_err() {
            self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
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
    queued_bytes: Arc<AtomicUsize>,
}

impl Writer {
    /// Writes until all handles are dropped. Flushes once per batch of queued lines.
    fn run(mut self, inbox: &Receiver<LogCommand>) {
        while let Ok(command) = inbox.recv() {
            self.execute(command);
            while let Ok(command) = inbox.try_recv() {
                self.execute(command);
            }
            self.flush();
        }
    }

    fn execute(&mut self, command: LogCommand) {
        match command {
            LogCommand::Write(line) => {
                self.queued_bytes.fetch_sub(line.len(), Ordering::Relaxed);
                if let Err(error) = self.out.write_all(line.as_bytes()) {
                    tracing::error!("cannot write the access log: {error}");
                    self.lost.fetch_add(1, Ordering::Relaxed);
                }
            }
            LogCommand::Reopen => self.reopen(),
            LogCommand::Finish(done) => {
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
