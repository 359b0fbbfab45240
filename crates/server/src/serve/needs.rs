//! What a server reads at its start besides the rules file: certificates, authorities, databases of addresses.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use tidegate_http::Place;

use super::ServeError;
use crate::{
    config::{AccessLog, Config, Identity, Proxy, TlsFiles},
    door::proxy::connector,
    geoip::{GeoIp, GeoIpError},
    link,
    net::{Behind, Tls, TlsError},
};

/// The files that would keep a server from starting with `config` on this machine, as it is now: certificates, authorities, databases of
/// addresses and a snapshot that cannot be read, and an access log that cannot be written. Reads them as the start does, and makes, writes and listens to nothing. What it does not look at: whether a log that is not there yet could be made in its folder, whether
/// addresses are in use, and Envoy's rules, which are [`Folder`](crate::envoy::Folder)'s to check.
#[must_use]
pub fn hindrances(config: &Config) -> Vec<ServeError> {
    let proxy = config.proxy.as_ref();
    let certificates = [
        (Behind::Grpc, config.grpc.tls.as_ref()),
        (Behind::Proxy, proxy.and_then(|proxy| proxy.tls.as_ref())),
        (Behind::Http, config.listeners.http.tls.as_ref()),
        (Behind::Resp, config.listeners.resp.tls.as_ref()),
    ];
    let certificates = certificates.map(|(behind, files)| tls(behind, files).err());
    let mut found: Vec<ServeError> = Vec::new();
    found.extend(certificates.into_iter().flatten().map(ServeError::from));
    found.extend(proxy.into_iter().flat_map(of_proxy));
    for place in &config.geoip {
        let opened = GeoIp::open(std::slice::from_ref(place));
        found.extend(opened.err().map(ServeError::from));
    }
    let redis = config.redis.as_ref();
    found.extend(redis.and_then(|redis| link::certificates(redis).err()));
    let snapshot = config.snapshot.as_ref();
    found.extend(snapshot.and_then(|snapshot| can_be_read(&snapshot.path).err()));
    found
}

/// What a server with `config` would have to do without on this machine, as it is now, and would complain of: a snapshot, if that has no folder.
#[must_use]
pub fn forfeits(config: &Config) -> Option<String> {
    let path = &config.snapshot.as_ref()?.path;
    let error = lacks_folder(path)?;
    let file = path.display();
    Some(format!(
        "counters would not be kept over a restart: cannot write the snapshot {file}: {error}; make it, or mend `store.memory.snapshot`"
    ))
}

fn of_proxy(proxy: &Proxy) -> Vec<ServeError> {
    let authorities = proxy.upstreams.iter().map(connector);
    let mut found: Vec<ServeError> = authorities
        .filter_map(|checked| checked.err().map(ServeError::from))
        .collect();
    let log = proxy.access_log.as_ref();
    found.extend(log.and_then(|log| Some(ServeError::unopened(log, has_a_place(log).err()?))));
    found
}

/// Whether a log can be written where it is, or has a folder to be made in.
fn has_a_place(log: &AccessLog) -> io::Result<()> {
    let Some(path) = &log.to else { return Ok(()) };
    if path.exists() {
        // Which changes nothing there.
        return OpenOptions::new().append(true).open(path).map(drop);
    }
    match folder_of(path) {
        Some(folder) => fs::metadata(folder).map(drop),
        None => Ok(()),
    }
}

/// Where `path` lies, unless that is where the server was started.
fn folder_of(path: &Path) -> Option<&Path> {
    path.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
}

/// Whether a snapshot can be read, if there is one.
fn can_be_read(path: &Path) -> Result<(), ServeError> {
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

/// What is wrong with the folder of `path`, if it cannot be looked at.
pub(super) fn lacks_folder(path: &Path) -> Option<io::Error> {
    let folder = folder_of(path)?;
    let error = fs::metadata(folder).err()?;
    let problem = format!("its folder {}: {error}", folder.display());
    Some(io::Error::new(error.kind(), problem))
}

pub(super) fn tls(behind: Behind, files: Option<&TlsFiles>) -> Result<Option<Arc<Tls>>, TlsError> {
    let loaded = files.map(|files| Tls::load(behind, files)).transpose()?;
    Ok(loaded.map(Arc::new))
}

/// Reads the databases of addresses, if there are any, and lets `identity` know.
pub(super) fn located(
    files: &[(Place, PathBuf)],
    mut identity: Identity,
) -> Result<(Option<Arc<GeoIp>>, Identity), GeoIpError> {
    if files.is_empty() {
        return Ok((None, identity));
    }
    let geoip = GeoIp::open(files)?;
    identity.atlas = Some(geoip.atlas());
    Ok((Some(Arc::new(geoip)), identity))
}
