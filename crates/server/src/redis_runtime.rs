//! Connects to the configured Redis, on a dedicated runtime thread.
//!
//! All workers share a few Redis connections. Commands that wait in the queue at the same time are
//! sent in one pipeline, even if they come from different workers.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
};

use tidegate_config::{Password, RedisConfig};
use tidegate_core::MemoryStore;
use tidegate_redis::{FallbackSettings, FallbackStore, Login, Redis, RedisSettings, RedisTls};

use crate::runtime_thread::RuntimeThread;

/// The reason why the connections to Redis could not be started.
#[derive(Debug, thiserror::Error)]
pub enum RedisStartError {
    /// A certificate for Redis could not be read.
    #[error("store.tls: cannot read {path}: {source}; fix the path or its permissions")]
    Certificate {
        /// The certificate file.
        path: PathBuf,
        /// The operating system error.
        source: io::Error,
    },
    /// The operating system could not start a thread.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// The thread that runs the Redis connections. Dropping this value closes the connections.
#[derive(Debug)]
pub(crate) struct RedisRuntime {
    redis: Arc<Redis>,
    prefix: String,
    settings: FallbackSettings,
    thread: RuntimeThread,
}

impl RedisRuntime {
    /// Starts connecting to the servers in `config`. `password` is the value of the environment
    /// variable that `config` names. If `config` names no variable, `password` is `None`.
    ///
    /// # Errors
    ///
    /// Fails if a certificate cannot be read or the system cannot start a thread.
    pub(crate) fn start(
        config: RedisConfig,
        password: Option<String>,
    ) -> Result<Self, RedisStartError> {
        let thread = RuntimeThread::start("redis")?;
        let RedisConfig {
            prefix, fallback, ..
        } = config.clone();
        let redis = Arc::new(Redis::start(settings(config, password)?, &thread.runtime));
        Ok(Self {
            redis,
            prefix,
            settings: fallback,
            thread,
        })
    }

    /// Runs `future` on the thread of the connections, and blocks until the future completes.
    pub(crate) fn run(&self, future: impl Future<Output = ()> + Send + 'static) {
        let (done, ended) = mpsc::channel::<()>();
        self.thread.runtime.spawn(async move {
            future.await;
            drop(done);
        });
        // The channel never carries a value. When the task ends, it drops the sender, which ends
        // the wait.
        let _ = ended.recv();
    }

    /// Creates the Redis-backed store, with `local` as its fallback.
    pub(crate) fn fallback_store(&self, local: MemoryStore) -> FallbackStore {
        let redis = Arc::clone(&self.redis);
        FallbackStore::new(redis, &self.prefix, local, self.settings)
    }
}

/// Reads the certificates that `config` names.
///
/// # Errors
///
/// Returns the error of the first certificate that cannot be read.
pub(crate) fn certificates(config: &RedisConfig) -> Result<RedisTls, RedisStartError> {
    let pem = |path: &Path| {
        fs::read(path).map_err(|source| RedisStartError::Certificate {
            path: path.to_owned(),
            source,
        })
    };
    let client = match &config.certificate {
        Some((cert, key)) => Some((pem(cert)?, pem(key)?)),
        None => None,
    };
    let ca = config.ca.as_deref().map(pem).transpose()?;
    Ok(RedisTls { ca, client })
}

fn settings(
    config: RedisConfig,
    password: Option<String>,
) -> Result<RedisSettings, RedisStartError> {
    let tls = certificates(&config)?;
    let password = match config.password {
        Password::Literal(literal) => Some(literal),
        Password::None | Password::Env(_) => password,
    };
    Ok(RedisSettings {
        login: Login {
            username: config.username,
            password,
        },
        sentinel_login: config.sentinel_login,
        tls,
        timeout: config.timeout,
        connections: config.connections,
        ..RedisSettings::new(config.topology)
    })
}
