import sys
from nanoengine.ruler import main
sys.exit(main())
