#!/bin/sh
# Turns the Debian packages into the base template. Runs as root inside the new
# root file system, without network, after the files of recipe/ are in place.
# Everything it writes is part of every sandbox: no secret of the host, and
# nothing that differs between two builds but by need.
set -eu
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
umask 022

# The agent's user. uid 1000 is what E2B's clients show and what volumes use.
useradd --uid 1000 --user-group --create-home --home-dir /home/user --shell /bin/bash user
passwd --quiet --delete user >/dev/null
passwd --quiet --lock user >/dev/null
printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' >/etc/sudoers.d/postern
# There is no syslog to tell.
printf 'Defaults !syslog\n' >>/etc/sudoers.d/postern
chmod 0440 /etc/sudoers.d/postern

# A python that started before the first "pip install" has no user site on its
# path if the directory was not there; so it is there.
install -d -o user -g user -m 0755 /home/user/.local /home/user/.local/bin /home/user/.local/lib \
	/home/user/.local/lib/python3.11 /home/user/.local/lib/python3.11/site-packages /home/user/.cache \
	/home/user/.config
# E2B's templates have /code, writable for everybody.
install -d -o user -g user -m 0777 /code
install -d -m 0755 /run/postern /run/e2b

printf 'sandbox\n' >/etc/hostname
cat >/etc/hosts <<'EOF'
127.0.0.1 localhost
::1 localhost ip6-localhost ip6-loopback
127.0.1.1 sandbox
10.0.0.1 postern.internal
EOF
rm -f /etc/resolv.conf
printf 'nameserver 10.0.0.1\noptions timeout:5 attempts:2\n' >/etc/resolv.conf

# Debian guards its python from pip (PEP 668). A sandbox is thrown away, and
# "pip install x" is what agents type.
cat >/etc/pip.conf <<'EOF'
[global]
break-system-packages = true
disable-pip-version-check = true
root-user-action = ignore
EOF

# What the build needed and a sandbox must not carry: proxy settings of the
# host may hold a password.
rm -f /etc/apt/apt.conf.d/99mmdebstrap
printf 'Acquire::Languages "none";\n' >/etc/apt/apt.conf.d/99postern
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/lib/dpkg/*-old \
	/var/log/* /tmp/* /var/tmp/*
install -d -m 0755 -o root -g root /var/lib/apt/lists/partial /var/cache/apt/archives/partial /var/log/apt
# The identity of the build is not that of any sandbox.
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/ssh/ssh_host_* /var/lib/systemd/random-seed

# Test suites: a tenth of the whole. Their directories stay, since a later
# "apt-get install" compiles what dpkg believes to be there.
find /usr/lib/python3/dist-packages -path '*/tests/*' -type f -delete

# The first import must not pay for compiling. Debian's packages compile their
# own; this is for the standard library's leftovers and for our files.
python3 -m compileall -q -j 0 /usr/lib/python3.11 /opt/postern >/dev/null || true

# matplotlib looks at every font once and remembers; do it here, as user.
runuser -u user -- env HOME=/home/user PATH="$PATH" MPLBACKEND=agg python3 -c '
import matplotlib.font_manager, matplotlib.pyplot as plt, io
plt.plot([1, 2]); plt.savefig(io.BytesIO(), format="png")'

# A template that cannot do its job must not be cached.
runuser -u user -- env HOME=/home/user PATH="$PATH" python3 -c '
import numpy, pandas, matplotlib, IPython
assert (numpy.eye(3) @ numpy.ones(3)).sum() == 3'
python -c 'import sys; assert sys.version_info.major == 3'
node -e 'process.exit(0)'
git --version >/dev/null
curl --version >/dev/null
runuser -u user -- sudo -n true
