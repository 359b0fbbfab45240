//! Tests of the hot reload of configuration files: either all files take effect, or none.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
};

use tempfile::TempDir;
use tidegate_config::envoy::{ConfigFiles, DomainFiles, FileFormat};
use tidegate_envoy::{
    ConfigFilesError, ConfigWatcher, Descriptor, RateLimitAnswer, RateLimitRequest, Variables,
};

use crate::subject::Started;

struct OnDisk {
    folder: TempDir,
    started: Started,
    watch: ConfigWatcher,
}

impl OnDisk {
    /// Creates a watcher for a folder that contains these files.
    fn with(files: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().unwrap();
        for (name, text) in files {
            write(&folder.path().join(name), text);
        }
        Self::on(folder, "")
    }

    fn on(folder: TempDir, inside: &str) -> Self {
        let started = Started::new(&Variables::new(), 1_700_000_040).unwrap();
        let path = folder.path().join(inside);
        let watched = ConfigFiles {
            path,
            format: FileFormat::Ratelimit,
            merging: DomainFiles::One,
        };
        let watch = ConfigWatcher::new(watched, Arc::clone(&started.service));
        watch.load().unwrap();
        Self {
            folder,
            started,
            watch,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Sends one request. Returns the limit of `user` in `domain` and the remaining hits.
    async fn ask(&self, domain: &str) -> Option<(u32, u32)> {
        let status = self.answer(domain).await.statuses.remove(0);
        status
            .current_limit
            .map(|limit| (limit.requests_per_unit, status.limit_remaining))
    }

    async fn answer(&self, domain: &str) -> RateLimitAnswer {
        let entries = vec![("user".into(), "u".into())];
        let descriptors = vec![Descriptor {
            entries,
            ..Descriptor::default()
        }];
        let request = RateLimitRequest {
            domain: domain.into(),
            descriptors,
            hits_addend: 1,
        };
        self.started
            .service
            .should_rate_limit(&request)
            .await
            .unwrap()
    }

    fn reload_if_changed(&self) -> Option<Result<usize, ConfigFilesError>> {
        self.watch.reload_if_changed()
    }
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Returns the configuration of a domain with a limit of `requests` per minute.
fn domain(name: &str, requests: u32) -> String {
    format!(
        "domain: {name}\ndescriptors: [{{key: user, rate_limit: {{unit: minute, requests_per_unit: {requests}}}}}]\n"
    )
}

#[tokio::test]
async fn envoy_folder_is_read_recursively() {
    let disk = OnDisk::with(&[
        ("a.yaml", &domain("a", 3)),
        ("deep/er/b", &domain("b", 4)),
        (".hidden.yaml", "no: [YAML"),
        ("..2026_01/a.yaml", &domain("a", 9)),
    ]);
    assert_eq!(disk.started.service.domains(), 2);
    assert_eq!(disk.ask("a").await, Some((3, 2)));
    assert_eq!(disk.ask("b").await, Some((4, 3)));
    assert!(disk.reload_if_changed().is_none());
}

#[tokio::test]
async fn envoy_folder_changes_take_effect_and_keep_counts() {
    let disk = OnDisk::with(&[("a.yaml", &domain("a", 3))]);
    assert_eq!(disk.ask("a").await, Some((3, 2)));
    write(&disk.path("a.yaml"), &domain("a", 10));
    assert_eq!(disk.reload_if_changed().unwrap().unwrap(), 1);
    assert_eq!(disk.ask("a").await, Some((10, 8)));
    write(&disk.path("b.yaml"), &domain("b", 5));
    assert_eq!(disk.reload_if_changed().unwrap().unwrap(), 2);
    fs::remove_file(disk.path("a.yaml")).unwrap();
    assert_eq!(disk.reload_if_changed().unwrap().unwrap(), 1);
    assert_eq!(disk.ask("a").await, None);
    assert_eq!(disk.started.service.domain_not_found("a"), 1);
}

/// If one of twenty files is invalid, its error is reported and the previous configuration stays
/// active.
#[tokio::test]
async fn envoy_folder_with_a_mistake_has_no_effect() {
    let names: Vec<String> = (0..20).map(|number| format!("d{number}")).collect();
    let files: Vec<(String, String)> = names
        .iter()
        .map(|name| (format!("{name}.yaml"), domain(name, 3)))
        .collect();
    let files: Vec<(&str, &str)> = files
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()))
        .collect();
    let disk = OnDisk::with(&files);
    write(
        &disk.path("d7.yaml"),
        "domain: d7\ndescriptors:\n  - {key: user, rate_limit: {unit: moon}}\n",
    );
    for name in ["d3", "d9"] {
        write(&disk.path(&format!("{name}.yaml")), &domain(name, 100));
    }
    let error = disk.reload_if_changed().unwrap().unwrap_err();
    assert_eq!(
        error.problems(),
        [
            "d7.yaml: descriptors[0].rate_limit.unit (line 3): invalid rate limit unit 'moon'; use one of second, minute, hour, day, week, month, year"
        ]
    );
    assert_eq!(disk.watch.last_mistakes(), error.problems());
    assert_eq!(
        (disk.watch.loads().succeeded, disk.watch.loads().failed),
        (1, 1)
    );
    assert_eq!(disk.started.service.domains(), 20);
    for name in ["d3", "d7", "d9"] {
        assert_eq!(disk.ask(name).await, Some((3, 2)), "{name}");
    }
    // The unchanged file is not read again.
    assert!(disk.reload_if_changed().is_none());
    write(&disk.path("d7.yaml"), &domain("d7", 50));
    assert_eq!(disk.reload_if_changed().unwrap().unwrap(), 20);
    assert!(disk.watch.last_mistakes().is_empty());
    assert_eq!(disk.ask("d7").await, Some((50, 48)));
    assert_eq!(disk.ask("d3").await, Some((100, 98)));
}

/// Tests the layout of a mounted ConfigMap. The files in a mounted ConfigMap are symbolic links
/// into a folder, and the path of this folder is also a symbolic link. Kubernetes updates the files
/// by replacing the link to the folder.
#[tokio::test]
async fn envoy_config_map_is_reloaded_when_its_link_is_swapped() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    write(&path("..old/a.yaml"), &domain("a", 3));
    write(&path("..new/a.yaml"), &domain("a", 7));
    symlink("..old", path("..data")).unwrap();
    symlink("..data/a.yaml", path("a.yaml")).unwrap();
    let disk = OnDisk::on(folder, "");
    assert_eq!(disk.ask("a").await, Some((3, 2)));
    symlink("..new", disk.path("..swap")).unwrap();
    fs::rename(disk.path("..swap"), disk.path("..data")).unwrap();
    assert_eq!(disk.reload_if_changed().unwrap().unwrap(), 1);
    assert_eq!(disk.ask("a").await, Some((7, 5)));
}

/// Tests envoyproxy/ratelimit's layout: the runtime root is reached through a link, and an update
/// replaces the link.
#[tokio::test]
async fn envoy_folder_behind_a_swapped_link_is_reloaded() {
    let folder = TempDir::new().unwrap();
    write(&folder.path().join("one/config/a.yaml"), &domain("a", 3));
    write(&folder.path().join("two/config/a.yaml"), &domain("a", 7));
    symlink("one", folder.path().join("current")).unwrap();
    let disk = OnDisk::on(folder, "current/config");
    assert_eq!(disk.ask("a").await, Some((3, 2)));
    symlink("two", disk.path("next")).unwrap();
    fs::rename(disk.path("next"), disk.path("current")).unwrap();
    assert_eq!(disk.reload_if_changed().unwrap().unwrap(), 1);
    assert_eq!(disk.ask("a").await, Some((7, 5)));
}

#[tokio::test]
async fn a_deleted_envoy_folder_keeps_its_configuration() {
    let disk = OnDisk::with(&[("config/a.yaml", &domain("a", 3))]);
    fs::remove_dir_all(disk.path("config")).unwrap();
    // As in envoyproxy/ratelimit, an empty folder is a configuration without domains.
    assert_eq!(disk.reload_if_changed().unwrap().unwrap(), 0);
    let folder = TempDir::new().unwrap();
    write(&folder.path().join("config/a.yaml"), &domain("a", 3));
    let disk = OnDisk::on(folder, "config");
    fs::rename(disk.path("config"), disk.path("elsewhere")).unwrap();
    let error = disk.reload_if_changed().unwrap().unwrap_err();
    assert!(
        matches!(error, ConfigFilesError::Unreadable { .. }),
        "{error}"
    );
    assert_eq!(disk.ask("a").await, Some((3, 2)));
    assert!(disk.reload_if_changed().is_none());
    fs::rename(disk.path("elsewhere"), disk.path("config")).unwrap();
    assert_eq!(disk.reload_if_changed().unwrap().unwrap(), 1);
    assert_eq!(disk.ask("a").await, Some((3, 1)));
}

#[tokio::test]
async fn a_single_envoy_file_is_a_configuration() {
    let folder = TempDir::new().unwrap();
    write(&folder.path().join("shop.yaml"), &domain("shop", 3));
    let disk = OnDisk::on(folder, "shop.yaml");
    assert_eq!(disk.ask("shop").await, Some((3, 2)));
    write(&disk.path("shop.yaml"), "domain: ''");
    let error = disk.reload_if_changed().unwrap().unwrap_err();
    assert_eq!(
        error.problems(),
        ["shop.yaml: line 1: config file cannot have empty domain"]
    );
}

/// A server with `start_without_config` still reports that the first load failed.
#[test]
fn a_failed_first_load_is_reported_like_any_other() {
    let started = Started::new(&Variables::new(), 1_700_000_040).unwrap();
    let missing = ConfigFiles {
        path: TempDir::new().unwrap().path().join("missing"),
        format: FileFormat::Ratelimit,
        merging: DomainFiles::One,
    };
    let watch = ConfigWatcher::new(missing, Arc::clone(&started.service));
    watch.load().unwrap_err();
    assert_eq!((watch.loads().succeeded, watch.loads().failed), (0, 1));
    assert!(!watch.last_mistakes().is_empty());
}
