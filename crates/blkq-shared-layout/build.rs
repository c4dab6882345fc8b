//! The difference between this package and blkq.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=shared_layout");
}
