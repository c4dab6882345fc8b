//! The builds of these sources that differ from the plain one, each by one name.

fn main() {
    println!("cargo::rerun-if-changed=../blkq/build.rs");
    // Threads, locks and atomics are the twins of a model checker.
    if ["LOOM", "SHUTTLE"].iter().any(|name| std::env::var_os(format!("CARGO_CFG_{name}")).is_some()) {
        println!("cargo::rustc-cfg=model_check");
    }
    if std::env::var("CARGO_PKG_NAME").as_deref() == Ok("blkq-shared-layout") {
        println!("cargo::rustc-cfg=shared_layout");
    }
}
