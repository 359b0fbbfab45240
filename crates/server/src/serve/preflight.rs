//! Preflight checks for the files that a server uses at startup in addition to the rules file, such
//! as certificates, trust anchors, GeoIP databases and the snapshot.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use tidegate_config::{
    Config, Envoy, Identity, Proxy,
    envoy::{RuleOrigin, XdsConfig},
};
use tidegate_identity::GeoIpField;
use tidegate_limiter::events::EventsError;
use tidegate_net::{ClientTlsError, Tls, TlsError, TlsFiles, TlsListener, client_config};
use tidegate_proxy::check_trust_anchors;

use super::error::ServeError;
use crate::{
    geoip::{GeoIp, GeoIpError},
    redis_runtime,
};

/// Returns the errors that would prevent a server with `config` from starting on this machine now.
///
/// Checks that certificates, trust anchors, GeoIP databases and the snapshot can be read. Also
/// checks that the access log and the files for recorded requests and events can be written. Reads
/// the files as at startup, but does not create or write a file, and does not open a listener.
///
/// Does not check whether addresses are in use, or whether a new log file can be created in its
/// folder. [`ConfigFiles`](tidegate_config::envoy::ConfigFiles) checks Envoy's rules.
#[must_use]
pub fn preflight_errors(config: &Config) -> Vec<ServeError> {
    let proxy = config.proxy.as_ref();
    let certificates = [
        (TlsListener::Grpc, config.grpc.tls.as_ref()),
        (
            TlsListener::Proxy,
            proxy.and_then(|proxy| proxy.tls.as_ref()),
        ),
        (TlsListener::Http, config.listeners.http.tls.as_ref()),
        (TlsListener::Resp, config.listeners.resp.tls.as_ref()),
        (TlsListener::Spop, config.listeners.spop.tls.as_ref()),
        (TlsListener::Admin, config.listeners.admin.tls.as_ref()),
    ];
    let certificates = certificates.map(|(listener, files)| load_tls(listener, files).err());
    let mut errors: Vec<ServeError> = Vec::new();
    errors.extend(certificates.into_iter().flatten().map(ServeError::from));
    errors.extend(proxy.into_iter().flat_map(of_proxy));
    errors.extend(config.envoy.as_ref().and_then(of_envoy));
    for place in &config.geoip {
        let opened = GeoIp::open(std::slice::from_ref(place));
        errors.extend(opened.err().map(ServeError::from));
    }
    let redis = config.redis.as_ref();
    errors.extend(
        redis
            .and_then(|redis| redis_runtime::certificates(redis).err())
            .map(ServeError::from),
    );
    errors.extend(config.record.as_ref().and_then(|record| {
        let source = check_writable(&record.to).err()?;
        let path = record.to.clone();
        Some(ServeError::Record { path, source })
    }));
    let events = config.events.0.as_ref();
    let files = events.map(|events| [("file", &events.file), ("audit", &events.audit)]);
    for (field, file) in files.into_iter().flatten() {
        errors.extend(file.as_ref().and_then(|file| {
            let source = check_writable(&file.to).err()?;
            let path = file.to.clone();
            Some(ServeError::Events(EventsError::File {
                field,
                path,
                source,
            }))
        }));
    }
    let snapshot = config.snapshot.as_ref();
    errors.extend(snapshot.and_then(|snapshot| check_readable(&snapshot.path).err()));
    errors
}

/// Returns a warning if the snapshot's folder cannot be accessed, for example because it is
/// missing. A server started with `config` on this machine would log the same warning.
#[must_use]
pub fn preflight_warnings(config: &Config) -> Option<String> {
    let path = &config.snapshot.as_ref()?.path;
    let error = folder_error(path)?;
    let file = path.display();
    Some(format!(
        "a restart would lose the counters: cannot write the snapshot {file}: {error}; create the folder, or fix `store.memory.snapshot`"
    ))
}

fn of_envoy(envoy: &Envoy) -> Option<ServeError> {
    match &envoy.rules {
        RuleOrigin::Files(_) => None,
        RuleOrigin::Xds(xds) => check_xds(xds).err().map(ServeError::from),
    }
}

/// Checks that the TLS files for the control plane can be used.
pub(super) fn check_xds(xds: &XdsConfig) -> Result<(), ClientTlsError> {
    match &xds.tls {
        None => Ok(()),
        Some(tls) => client_config(&tls.files, b"h2").map(drop),
    }
}

fn of_proxy(proxy: &Proxy) -> Vec<ServeError> {
    let authorities = proxy.upstreams.iter().map(check_trust_anchors);
    let mut errors: Vec<ServeError> = authorities
        .filter_map(|checked| checked.err().map(ServeError::from))
        .collect();
    let log = proxy.access_log.as_ref();
    errors.extend(log.and_then(|log| {
        let source = check_writable(log.to.as_deref()?).err()?;
        Some(ServeError::access_log(log, source))
    }));
    errors
}

/// Checks that the log file can be appended to. If the file does not exist, checks that its folder
/// exists.
fn check_writable(path: &Path) -> io::Result<()> {
    if path.exists() {
        // Opening a file for appending does not change the file.
        return OpenOptions::new().append(true).open(path).map(drop);
    }
    match folder_of(path) {
        Some(folder) => fs::metadata(folder).map(drop),
        None => Ok(()),
    }
}

/// Returns the parent folder of `path`; `None` if that is the working directory.
fn folder_of(path: &Path) -> Option<&Path> {
    path.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
}

/// Checks that the snapshot can be read, if it exists.
fn check_readable(path: &Path) -> Result<(), ServeError> {
    let read = File::open(path).and_then(|mut file| file.read(&mut [0]));
    let is_there = |error: &io::Error| error.kind() != io::ErrorKind::NotFound;
    let wrong = read.err().filter(is_there);
    wrong.map_or(Ok(()), |source| {
        Err(ServeError::Snapshot {
            path: path.to_owned(),
            source,
        })
    })
}

/// Returns an error if the parent folder of `path` cannot be accessed.
pub(super) fn folder_error(path: &Path) -> Option<io::Error> {
    let folder = folder_of(path)?;
    let error = fs::metadata(folder).err()?;
    let problem = format!("its folder {}: {error}", folder.display());
    Some(io::Error::new(error.kind(), problem))
}

pub(super) fn load_tls(
    listener: TlsListener,
    files: Option<&TlsFiles>,
) -> Result<Option<Arc<Tls>>, TlsError> {
    let loaded = files.map(|files| Tls::load(listener, files)).transpose()?;
    Ok(loaded.map(Arc::new))
}

/// Loads the GeoIP databases, if any are configured, and makes `identity` use them.
pub(super) fn open_geoip(
    files: &[(GeoIpField, PathBuf)],
    mut identity: Identity,
) -> Result<(Option<Arc<GeoIp>>, Identity), GeoIpError> {
    if files.is_empty() {
        return Ok((None, identity));
    }
    let geoip = GeoIp::open(files)?;
    identity.geoip = Some(geoip.source());
    Ok((Some(Arc::new(geoip)), identity))
}
