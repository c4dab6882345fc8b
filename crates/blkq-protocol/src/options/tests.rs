use super::*;
use crate::harness::options;

#[test]
fn ceph_files_are_found_as_ceph_clients_find_them() {
    let home = std::env::temp_dir().join(format!("blkq-ceph-home-{}", std::process::id()));
    std::fs::create_dir_all(home.join(".ceph")).unwrap();
    let of_user = home.join(".ceph/ceph.conf");
    std::fs::write(&of_user, "").unwrap();
    let found = |words: &[&str], environment: &[(&str, &str)]| {
        let mut options = options(words);
        find_ceph_files(&mut options, |name| {
            environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        });
        (options.ceph_conf, options.ceph_keyring)
    };
    let path = |path: &str| Some(PathBuf::from(path));
    let named = [("CEPH_CONF", "/c"), ("CEPH_KEYRING", "/k"), ("HOME", home.to_str().unwrap())];
    assert_eq!(found(&["rbd:p/i"], &named), (path("/c"), path("/k")));
    let given = ["rbd:p/i", "--ceph-conf=/o", "--ceph-keyring=/r"];
    assert_eq!(found(&given, &named), (path("/o"), path("/r")));
    let usual = Path::new("/etc/ceph/ceph.conf");
    let expected = if usual.is_file() { usual.to_owned() } else { of_user };
    assert_eq!(found(&["rbd:p/i"], &named[2..]), (Some(expected), None));
    assert_eq!(found(&["d.img"], &named), (None, None));
    std::fs::remove_dir_all(home).unwrap();
}

#[test]
fn relative_paths_are_relative_to_the_given_directory() {
    let words = ["d.img", "--listen=unix:./s", "--listen=tcp:h:1", "--metrics=unix:m", "--pid-file=/p"];
    let words = [&words[..], &["--tls-certificates=../tls"]].concat();
    let absolute = options(&words).absolute(Path::new("/nowhere")).unwrap();
    assert_eq!(absolute.image, DriverSpec::Image("/nowhere/d.img".into()));
    let unix = |path: &str| Address::Unix(path.into());
    assert_eq!(absolute.listen, [unix("/nowhere/s"), Address::Tcp("h".into(), 1)]);
    assert_eq!(
        (absolute.metrics.clone(), absolute.pid_file.clone()),
        (Some(unix("/nowhere/m")), Some("/p".into()))
    );
    assert_eq!(absolute.tls_certificates, Some("/nowhere/../tls".into()));
}
