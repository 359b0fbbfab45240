//! Snapshots of the memory store.

use std::io;

use tidegate_config::Snapshot;
use tidegate_limiter::ServerLimiter;

use super::ServerHandle;

impl ServerHandle {
    pub(super) fn save(&self) {
        // `save` logs the error and keeps it for the status page.
        drop(save(&self.limiter, self.snapshot.as_ref()));
    }
}

/// Writes the snapshot, if one is configured. The error names the file.
pub(super) fn save(limiter: &ServerLimiter, snapshot: Option<&Snapshot>) -> io::Result<()> {
    let Some(Snapshot { path, .. }) = snapshot else {
        return Ok(());
    };
    let now = limiter.now();
    let saved = limiter.save_snapshot(path);
    limiter.metrics().count_snapshot(saved.is_err());
    match saved {
        Ok(()) => {
            limiter.snapshots().record_success();
            Ok(())
        }
        Err(error) => {
            let problem = format!("cannot write the snapshot {}: {error}", path.display());
            limiter.snapshots().fail(&problem, now);
            Err(io::Error::new(error.kind(), problem))
        }
    }
}
