//! Starts Envoy's rate limit service, with rules from files or from a control plane.

use std::sync::Arc;

use tidegate_config::{
    Envoy,
    envoy::{FileFormat, RuleOrigin},
};
use tidegate_envoy::{
    ConfigFilesError, ConfigWatcher, InitialConfig, RateLimitService, RuleSource, XdsClient,
};
use tidegate_limiter::ServerLimiter;

use super::{error::ServeError, preflight};
use crate::runtime_thread::RuntimeThread;

/// Starts the service. Returns the control plane connection's thread, if there is one.
pub(super) fn start(
    envoy: Envoy,
    limiter: &Arc<ServerLimiter>,
) -> Result<(Arc<RuleSource>, Option<RuntimeThread>), ServeError> {
    let service = Arc::new(RateLimitService::new(Arc::clone(limiter), envoy.settings));
    match envoy.rules {
        RuleOrigin::Files(files) => {
            let format = files.format;
            let watcher = ConfigWatcher::new(files, service);
            let loaded = load_at_start(&watcher, envoy.start_without_config);
            loaded.map_err(|error| match format {
                FileFormat::Ratelimit => ServeError::Envoy(error),
                FileFormat::Limitador => ServeError::Limitador(error),
            })?;
            Ok((Arc::new(RuleSource::Files(watcher)), None))
        }
        RuleOrigin::Xds(xds) => {
            // Without this check, the server would start with an invalid path, and would only log
            // the error.
            preflight::check_xds(&xds)?;
            let initial = if envoy.start_without_config {
                InitialConfig::Optional
            } else {
                InitialConfig::Required
            };
            let client = Arc::new(XdsClient::new(*xds, service, initial));
            let thread = RuntimeThread::start("xds")?;
            let running = Arc::clone(&client);
            thread.runtime.spawn(async move { running.run().await });
            Ok((Arc::new(RuleSource::Xds(client)), Some(thread)))
        }
    }
}

/// Loads the files of Envoy's rate limit service. Invalid files prevent the server from starting
/// unless `start_without_config` is set.
fn load_at_start(
    watcher: &ConfigWatcher,
    start_without_config: bool,
) -> Result<(), ConfigFilesError> {
    match watcher.load() {
        Ok(_) => watcher.log_start(),
        Err(error) if start_without_config => {
            tracing::error!(
                "started without the configuration of Envoy's rate limit service: {error}"
            );
        }
        Err(error) => return Err(error),
    }
    Ok(())
}
