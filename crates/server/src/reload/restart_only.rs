//! Settings of the rules file that take effect only at startup.

use super::LoadError;
use crate::config::{
    AdminToken, Config, Grpc, Headers, Identity, Listen, Listeners, Shutdown, Snapshot,
};

/// The settings that a server was started with and keeps until it is restarted.
#[derive(Clone, Debug, Default)]
pub struct RestartOnlySettings {
    identity: Identity,
    listen: Listen,
    listeners: Listeners,
    headers: Headers,
    grpc: Grpc,
    shutdown: Shutdown,
    admin_token: AdminToken,
    snapshot: Option<Snapshot>,
}

impl RestartOnlySettings {
    /// Copies these settings from `config`.
    #[must_use]
    pub fn with(config: &Config) -> Self {
        Self {
            identity: config.identity.clone(),
            listen: config.listen,
            listeners: config.listeners.clone(),
            headers: config.headers,
            grpc: config.grpc.clone(),
            shutdown: config.shutdown,
            admin_token: config.admin_token.clone(),
            snapshot: config.snapshot.clone(),
        }
    }

    /// Warns about settings in `config` that differ from the running ones and need a restart.
    ///
    /// # Errors
    ///
    /// Rejects a change of `clients` or `entries`. The new rules may use entries that the running
    /// settings do not produce, and rules keyed by a missing entry never match.
    pub(super) fn check(&self, config: &Config) -> Result<(), LoadError> {
        let (ours, theirs) = (&self.identity, &config.identity);
        if ours.trust != theirs.trust {
            return Err(LoadError::Start("clients"));
        }
        if ours.parts != theirs.parts {
            return Err(LoadError::Start("entries"));
        }
        let others = [
            (
                "listen",
                self.listen == config.listen && self.listeners == config.listeners,
            ),
            ("headers", self.headers == config.headers),
            ("grpc", self.grpc == config.grpc),
            ("shutdown", self.shutdown == config.shutdown),
            ("admin", self.admin_token == config.admin_token),
            ("store.memory.snapshot", self.snapshot == config.snapshot),
        ];
        for (section, _) in others.iter().filter(|(_, is_alike)| !is_alike) {
            tracing::warn!("changes to {section} require a restart");
        }
        Ok(())
    }
}
