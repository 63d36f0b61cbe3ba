# A python that started before the first "pip install --user" has no user site on its
# path if the directory was not there; so it is there.
install -d -o user -g user -m 0755 /home/user/.local /home/user/.local/bin /home/user/.local/lib \
	/home/user/.local/lib/python3.11 /home/user/.local/lib/python3.11/site-packages

# Debian guards its python from pip (PEP 668). A sandbox is thrown away, and
# "pip install x" is what agents type.
cat >/etc/pip.conf <<'END'
[global]
break-system-packages = true
disable-pip-version-check = true
root-user-action = ignore
END

# Test suites: a tenth of the whole. Their directories stay, since a later
# "apt-get install" compiles what dpkg believes to be there.
find /usr/lib/python3/dist-packages -path '*/tests/*' -type f -delete

# The first import must not pay for compiling. Debian's packages compile their
# own; this is for the standard library's leftovers and for our files.
python3 -m compileall -q -j 0 /usr/lib/python3.11 /opt/postern >/dev/null || true

# matplotlib looks at every font once and remembers; do it here, as user. Without the
# seed, the order of its list is another each time.
runuser -u user -- env HOME=/home/user PATH="$PATH" PYTHONHASHSEED=0 MPLBACKEND=agg python3 -c '
import matplotlib.font_manager, matplotlib.pyplot as plt, io
plt.plot([1, 2]); plt.savefig(io.BytesIO(), format="png")'

runuser -u user -- env HOME=/home/user PATH="$PATH" python3 -c '
import numpy, pandas, matplotlib, requests, IPython
assert (numpy.eye(3) @ numpy.ones(3)).sum() == 3'
python -c 'import sys; assert sys.version_info.major == 3'
git --version >/dev/null
