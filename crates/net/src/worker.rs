//! A worker: one thread with one runtime, which serves some of the connections.

use std::{future::Future, io, thread::JoinHandle};

use tokio::{
    runtime::{Builder, LocalOptions, LocalRuntime},
    sync::{
        mpsc::{self, UnboundedReceiver, UnboundedSender},
        oneshot,
    },
};

/// A handle for spawning background futures on one worker.
#[derive(Clone, Debug)]
pub struct Tasks(pub(super) Jobs);

impl Tasks {
    /// Spawns a future on the worker. The future is dropped when the server stops.
    pub fn spawn<F>(&self, make: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        self.0.spawn(make);
    }
}

enum Job {
    Run(Box<dyn FnOnce() + Send>),
    Stop,
}

/// The sending end of a worker's job queue. The length of the queue is bounded by the connection
/// limits of the listeners.
#[derive(Clone, Debug)]
pub(super) struct Jobs(UnboundedSender<Job>);

impl Jobs {
    /// Creates a future and runs it on the worker's thread. Has no effect if the worker has
    /// stopped.
    pub(super) fn spawn<F>(&self, make: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        let run = Box::new(move || drop(tokio::task::spawn_local(make())));
        // If the worker has stopped, the job is dropped, which closes the job's socket.
        let _ = self.0.send(Job::Run(run));
    }

    /// Waits until every task that the worker is running has yielded.
    pub(super) async fn yielded(&self) {
        let (done, is_done) = oneshot::channel();
        self.spawn(move || async move {
            let _ = done.send(());
        });
        let _ = is_done.await;
    }
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) jobs: Jobs,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts worker `number`.
    pub(super) fn start(number: usize) -> io::Result<Self> {
        let (jobs, inbox) = mpsc::unbounded_channel();
        let (report, started) = std::sync::mpsc::channel();
        let body = move || match runtime() {
            Ok(runtime) => {
                drop(report);
                runtime.block_on(work(inbox));
            }
            Err(error) => drop(report.send(error)),
        };
        let thread = std::thread::Builder::new()
            .name(format!("worker-{number}"))
            .spawn(body)?;
        match started.recv() {
            Ok(error) => Err(error),
            // The thread has dropped its sender without sending an error, so its runtime has
            // started successfully.
            Err(_) => Ok(Self {
                jobs: Jobs(jobs),
                thread: Some(thread),
            }),
        }
    }

    /// Tells the worker to drop its connections and stop.
    pub(super) fn stop(&self) {
        let _ = self.jobs.0.send(Job::Stop);
    }

    /// Waits for the thread to end, after [`Self::stop`].
    pub(super) fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a worker thread panicked");
        }
    }
}

fn runtime() -> io::Result<LocalRuntime> {
    Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build_local(LocalOptions::default())
}

async fn work(mut inbox: UnboundedReceiver<Job>) {
    while let Some(Job::Run(run)) = inbox.recv().await {
        run();
    }
}
