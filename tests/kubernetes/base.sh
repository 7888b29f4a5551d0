#!/usr/bin/env bash
# tests/kubernetes/base.sh PYTHON IMAGE: make a base image of this machine's own Python and shell and the libraries that they
# load, for where no image registry can be reached. Good for a test: it is as up to date as the machine. Needs buildah and root.
set -euo pipefail
python=$(realpath "${1:?usage: tests/kubernetes/base.sh PYTHON IMAGE}") image=${2:?}
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-overlay}
container=$(buildah from scratch)
trap 'buildah rm "$container" > /dev/null' EXIT
root=$(buildah mount "$container")

mkdir -p "$root"/{usr/local/bin,usr/local/lib,bin,etc,proc,sys,dev,tmp,var/run}
chmod 1777 "$root/tmp"
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
library=$("$python" -c 'import os; print(os.path.dirname(os.__file__))')
cp "$python" "$root/usr/local/bin/$version"
ln -s "$version" "$root/usr/local/bin/python3"
tar -C "$(dirname "$library")" -c --exclude=site-packages --exclude=dist-packages --exclude=test --exclude='config-*' \
  --exclude=idlelib --exclude=tkinter "$version" | tar -C "$root/usr/local/lib" -x
wheels=/usr/share/python-wheels # where Debian's Python keeps the pip of its venv module
[ ! -d $wheels ] || { mkdir -p "$root/usr/share"; cp -r $wheels "$root/usr/share"; }
programs=(sh true kill ls cat)
for program in "${programs[@]}"; do cp -L "$(PATH=/usr/bin:/bin type -P "$program")" "$root/bin/$program"; done

# What all of them are linked with, and what torch's wheel expects of any Linux.
mapfile -t linked < <(find "$root/usr/local" "$root/bin" -type f \( -name '*.so*' -o -perm -u+x \) -print0 |
  xargs -0 ldd 2> /dev/null | grep -oE '/[^ ]+\.so[^ ]*' | sort -u)
for name in libstdc++.so.6 libgcc_s.so.1 librt.so.1 libdl.so.2 libpthread.so.0 libutil.so.1; do
  linked+=("$(ldconfig -p | awk -v name="$name" '$1 == name && !found++ { print $NF }')")
done
for path in "${linked[@]}"; do
  [[ $path = "$root"* || -z $path ]] || install -D -m 755 "$(realpath "$path")" "$root$path"
done
buildah config --env PATH=/usr/local/bin:/usr/bin:/bin --cmd python3 "$container"
buildah commit -q "$container" "$image" > /dev/null
