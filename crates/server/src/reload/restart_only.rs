//! Settings of the rules file that take effect only at startup.

use std::path::PathBuf;

use tidegate_config::{
    AdminToken, Config, DenialsConfig, Envoy, EventsSection, Grpc, Headers, Identity, KeyPrivacy,
    ListenAddresses, ListenerSettings, OperatorToken, RecordConfig, RedisConfig,
    ReservationsConfig, ShutdownConfig, Snapshot, Top,
};
use tidegate_core::MemoryBounds;
use tidegate_identity::GeoIpField;

use super::LoadError;

/// The settings that the server reads at startup and keeps until it is restarted.
#[derive(Clone, Debug, Default)]
pub struct RestartOnlySettings {
    identity: Identity,
    listen: ListenAddresses,
    listeners: ListenerSettings,
    headers: Headers,
    grpc: Grpc,
    shutdown: ShutdownConfig,
    admin_token: AdminToken,
    operator_tokens: Vec<OperatorToken>,
    memory: MemoryBounds,
    snapshot: Option<Snapshot>,
    redis: Option<RedisConfig>,
    geoip: Vec<(GeoIpField, PathBuf)>,
    envoy: Option<Envoy>,
    key_privacy: KeyPrivacy,
    top: Top,
    denials: DenialsConfig,
    events: EventsSection,
    record: Option<RecordConfig>,
    reservations: ReservationsConfig,
}

impl RestartOnlySettings {
    /// Copies the restart-only settings from `config`.
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
            operator_tokens: config.operator_tokens.clone(),
            memory: config.memory,
            snapshot: config.snapshot.clone(),
            redis: config.redis.clone(),
            geoip: config.geoip.clone(),
            envoy: config.envoy.clone(),
            key_privacy: config.key_privacy.clone(),
            top: config.top,
            denials: config.denials,
            events: config.events.clone(),
            record: config.record.clone(),
            reservations: config.reservations.clone(),
        }
    }

    /// Returns the settings in `config` that differ from the running server's settings and need a
    /// restart.
    ///
    /// # Errors
    ///
    /// Rejects a change to `clients` or `entries`. The new rules may use entries that the server
    /// does not extract until it is restarted. Until the restart, rules keyed by such an entry
    /// would never match.
    pub(super) fn check(&self, config: &Config) -> Result<Vec<&'static str>, LoadError> {
        let (ours, theirs) = (&self.identity, &config.identity);
        if ours.trust != theirs.trust {
            return Err(LoadError::Start("clients"));
        }
        if ours.derived != theirs.derived {
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
            (
                "admin",
                self.admin_token == config.admin_token
                    && self.operator_tokens == config.operator_tokens,
            ),
            (
                "store",
                self.memory == config.memory && self.redis == config.redis,
            ),
            ("store.memory.snapshot", self.snapshot == config.snapshot),
            ("geoip", self.geoip == config.geoip),
            ("envoy", self.envoy == config.envoy),
            ("privacy", self.key_privacy == config.key_privacy),
            ("top", self.top == config.top),
            ("denials", self.denials == config.denials),
            ("events", self.events == config.events),
            ("record", self.record == config.record),
            ("reservations", self.reservations == config.reservations),
        ];
        let changed = others.iter().filter(|(_, is_alike)| !is_alike);
        Ok(changed.map(|(section, _)| *section).collect())
    }
}
