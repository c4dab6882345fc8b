//! Reads from the active image, its backing files, and compressed clusters.

use std::ops::Range;
use std::rc::Rc;

use blkq::{IoBuffer, IoResult, Status};

use crate::qcow2::tables::state::{Found, State};

use super::allocate::until_ready;
use super::env::Env;
use super::inflate::Compressed;
use super::operations::Memory;

/// Operations of one request in flight at the same time.
const READS_MAX: usize = 64;

/// Reads `bytes` from `position` of the device on into the memory of a request. Fails with [`Status::Io`] if
/// the tables are damaged.
pub async fn read(env: &Env, position: u64, bytes: u64, memory: &Memory) -> IoResult {
    let (mut done, mut running) = (0, Vec::new());
    let (mut result, mut bounce) = (Ok(()), None);
    while done < bytes && result.is_ok() {
        let (found, run) = find(env, position + done, bytes - done).await?;
        match found {
            Found::Zero | Found::Unallocated => memory.clear(done, run),
            Found::Data { layer, host } => {
                let op = env.read_op(layer, host).with_memory(memory, done, run);
                running.push(env.io.submit(op.in_epoch(&env.shared.epochs)));
                if running.len() == READS_MAX {
                    for read in running.drain(..) {
                        result = result.and(read.await.map(drop));
                    }
                }
            }
            Found::Compressed { layer, host, bytes, skip } => {
                if bounce.is_none() {
                    // Looks the cluster up again after the wait, because a write may have replaced it
                    // meanwhile.
                    let image = usize::from(layer);
                    let cluster = env.state().tables(image).map_or(0, |tables| tables.header.cluster_bytes());
                    bounce = Some(env.reserve(bytes + cluster).await);
                    continue;
                }
                let content = decompressed(env, layer, host, bytes).await?;
                bounce = None;
                let Some(content) = content else { continue };
                memory.fill(done, &content[skip as usize..][..run as usize]);
            }
        }
        done += run;
    }
    for read in running {
        result = result.and(read.await.map(drop));
    }
    result
}

/// Reads `bytes` from `position` of the device on. The caller has reserved the memory ([`Env::reserve`]).
pub async fn read_device(env: &Env, position: u64, bytes: u64) -> Result<IoBuffer, Status> {
    let mut buffer = IoBuffer::zeroed(bytes as usize);
    let mut done = 0;
    while done < bytes {
        let (found, run) = find(env, position + done, bytes - done).await?;
        let part = done as usize..(done + run) as usize;
        match found {
            Found::Zero | Found::Unallocated => {}
            Found::Data { layer, host } => {
                let read = env.read(layer, host, run).await?;
                if run == bytes {
                    return Ok(read);
                }
                buffer[part].copy_from_slice(&read);
            }
            Found::Compressed { layer, host, bytes, skip } => {
                let Some(content) = decompressed(env, layer, host, bytes).await? else { continue };
                buffer[part].copy_from_slice(&content[skip as usize..][..run as usize]);
            }
        }
        done += run;
    }
    Ok(buffer)
}

async fn find(env: &Env, position: u64, bytes: u64) -> Result<(Found, u64), Status> {
    let find = |state: &mut State| state.find(state.layers.len(), position, bytes, None);
    until_ready(env, find).await.map(|(found, _, run)| (found, run))
}

/// The content of a compressed cluster, of which at most `bytes` compressed bytes are at `host`. `None`:
/// another task was decompressing it and the cluster must be looked up again.
async fn decompressed(env: &Env, layer: u8, host: u64, bytes: u64) -> Result<Option<Rc<Vec<u8>>>, Status> {
    let cached = |env: &Env| env.decompressed.borrow().as_ref().filter(|one| one.0 == (layer, host)).cloned();
    if let Some((_, content)) = cached(env) {
        return Ok(Some(content));
    }
    if !env.decompressing.borrow_mut().insert((layer, host)) {
        while env.decompressing.borrow().contains(&(layer, host)) {
            env.io.wait().await;
        }
        return Ok(cached(env).map(|(_, content)| content));
    }
    let done = decompress(env, layer, host, bytes).await.map(Rc::new);
    env.decompressing.borrow_mut().remove(&(layer, host));
    if let Ok(content) = &done {
        *env.decompressed.borrow_mut() = Some(((layer, host), Rc::clone(content)));
    }
    env.io.changed();
    done.map(Some)
}

async fn decompress(env: &Env, layer: u8, host: u64, bytes: u64) -> Result<Vec<u8>, Status> {
    let compressed = Compressed::find(&env.state(), layer, host, bytes)?;
    let Range { start, end } = compressed.file;
    let read = env.read(layer, start, end - start).await?;
    env.inflate(((layer, host), compressed, read)).await
}
